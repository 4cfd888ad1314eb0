// Streams a chat, cancels a request, and reads why a request was refused.
import type { MessageInitShape } from "@bufbuild/protobuf";
import { type Client, Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { BadRequestSchema, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { GenerationService } from "./gen/penstock/v1/generation_pb.js";
import { type GenerateRequestSchema } from "./gen/penstock/v1/generation_request_pb.js";

type Generation = Client<typeof GenerationService>;

const ask = (question: string) => ({
  case: "chat" as const,
  value: { messages: [{ role: "user", content: question }] },
});

/** Prints an answer as it comes. */
async function chat(client: Generation) {
  process.stdout.write("answer: ");
  const start = { prompt: ask("What does a kernel do?"), sampling: { maxTokens: 40 } };
  for await (const response of client.generateOne({ start })) {
    for (const delta of response.deltas) process.stdout.write(delta.text);
  }
  process.stdout.write("\n");
}

/** Ends one request of a stream, which may carry many, after its first text. */
async function cancel(client: Generation) {
  let begun = () => {};
  const firstText = new Promise<void>((resolve) => (begun = resolve));

  async function* frames(): AsyncGenerator<MessageInitShape<typeof GenerateRequestSchema>> {
    yield { frame: { case: "start", value: { ref: 1, prompt: ask("Count to a million.") } } };
    await firstText;
    yield { frame: { case: "cancel", value: { refs: [1] } } };
  }

  for await (const response of client.generate(frames())) {
    if (response.deltas.length > 0) begun();
    for (const finished of response.finished) {
      const code = Code[finished.status?.code ?? 0];
      console.log(`request ${finished.ref}: ${code} after ${finished.usage?.outputTokens} tokens`);
    }
  }
}

/** Sends a request without a prompt, and prints the details of its status. */
async function refused(client: Generation) {
  try {
    for await (const _ of client.generateOne({ start: {} }));
  } catch (error) {
    const failure = ConnectError.from(error);
    console.log(`refused: ${Code[failure.code]}, ${failure.rawMessage}`);
    for (const { reason, domain } of failure.findDetails(ErrorInfoSchema)) console.log(`reason: ${reason} of ${domain}`);
    for (const { fieldViolations } of failure.findDetails(BadRequestSchema)) {
      for (const { field } of fieldViolations) console.log(`field: ${field}`);
    }
  }
}

const client = createClient(GenerationService, createGrpcTransport({ baseUrl: `http://${process.argv[2]}` }));
await chat(client);
await cancel(client);
await refused(client);
