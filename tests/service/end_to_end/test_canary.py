"""What callers send and get is in no log, metric or status, whatever goes wrong: canaries go through every path of a
service with all its processes, at the level debug, and are then looked for."""

import asyncio
import hashlib
import http.client
import json
import os
import re
import signal
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import json_format

import penstock.v1 as pb
from penstock.v1 import Constraint
from penstock.v1.admin_pb2_grpc import AdminServiceStub
from penstock.v1.classification_pb2_grpc import ClassificationServiceStub
from penstock.v1.embedding_pb2_grpc import EmbeddingServiceStub
from penstock.v1.generation_pb2_grpc import GenerationServiceStub
from penstock.v1.tokenizer_pb2_grpc import TokenizerServiceStub

PENSTOCK = Path(sys.executable).with_name("penstock")
PROMPT, SCHEMA = "canary-in-the-prompt", "canary_in_the_schema"
KEY, WRONG_KEY, ADMIN_KEY = "canary-key-of-a-caller", "canary-key-of-nobody", "canary-key-of-an-operator"
BREAK = f"{PROMPT} breaks it"
"""A prompt that makes the service fail with an error that quotes it, as ``FRAGILE`` has it."""
FRAGILE = f"""
import sys

def fragile(call):
    def encode(self, text, *arguments):
        if {BREAK!r} in text:
            raise ValueError(f"cannot encode {{text!r}}")
        return call(self, text, *arguments)
    return encode

if "serve" in sys.orig_argv:
    from penstock.service.text.tokenizer import Tokenizer
    Tokenizer.encode = fragile(Tokenizer.encode)
"""
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {SCHEMA: {"type": "string"}}}},
}


class Service:
    """A service of several processes, and everything that it told."""

    def __init__(self, process, log, addresses):
        self.process = process
        self.log = log
        self.addresses = addresses
        self.statuses = []
        """Of calls and HTTP requests that failed: all that came with them."""
        self.outputs = []

    async def expect(self, code, call):
        """The call's answer where it ends with OK, and else nothing; its status is kept. ``code``: one, or A|B."""
        ended, answer = "OK", None
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            self.statuses.append(f"{error.details()} {error.trailing_metadata()!r}")
            ended = error.code().name
        assert ended in code.split("|")
        return answer

    async def post(self, path, body, status, key=KEY):
        """An HTTP request's answer; kept where it failed."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()

        def send():
            connection = http.client.HTTPConnection(self.addresses["http"], timeout=120)
            headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
            connection.request("POST", path, raw, headers)
            answer = connection.getresponse()
            text, told = answer.read().decode(), str(answer.headers)
            connection.close()
            return answer.status, text, told

        got, text, told = await asyncio.to_thread(send)
        assert got == status, text
        self.statuses.append(told if status == 200 else f"{told} {text}")
        return text


async def get_metrics(address):
    def get():
        connection = http.client.HTTPConnection(address, timeout=120)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        return page

    return await asyncio.to_thread(get)


@pytest.fixture
async def service(tmp_path):
    """It has a gateway, keys and a page of metrics, and logs all it can."""
    keys, log = tmp_path / "keys", tmp_path / "log"
    lines = ((KEY, "team"), (ADMIN_KEY, "operators admin"))
    keys.write_text("".join(f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {who}\n" for key, who in lines))
    (tmp_path / "sitecustomize.py").write_text(FRAGILE)
    flags = ("--log-level=debug", "--log-format=json", "--threads=1", "--kv-cache-memory-bytes=64M")
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            PENSTOCK,
            *("serve", "--port=0", "--http-port=0", f"--api-keys-file={keys}", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
    try:
        assert process.stdout is not None
        greeting = (await process.stdout.readuntil(b"Ctrl-C stops it.")).decode()
        addresses = {
            "grpc": address_in(greeting, "serves demo on {}\n"),
            "http": address_in(greeting, "http://{}/v1"),
            "admin": address_in(greeting, "--admin {}"),
            "metrics": address_in(greeting, "http://{}/metrics"),
        }
        yield Service(process, log, addresses)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def address_in(greeting, where):
    (address, *_) = re.findall(where.format(r"(127\.0\.0\.1:\d+)"), greeting)
    return address


def bearer(key):
    return (("authorization", f"Bearer {key}"),)


def text(prompt, **sampling):
    return pb.GenerationStart(
        text=prompt, sampling=pb.SamplingParams(**{"max_tokens": 32, "ignore_eos": True, **sampling})
    )


async def call_the_service(service, channel):
    """Every method, well and badly."""
    generation, mine = GenerationServiceStub(channel), bearer(KEY)

    async def complete(code, start, metadata=mine):
        answer = await service.expect(code, generation.Complete(pb.CompleteRequest(start=start), metadata=metadata))
        if answer is not None:
            service.outputs.append(answer.choices[0].text)

    await complete("OK", text(PROMPT, stop=[f"{PROMPT} stops it"]))
    await complete("INVALID_ARGUMENT", text(PROMPT, temperature=-1))
    await complete("INVALID_ARGUMENT", text(PROMPT * 3000))
    await complete("INTERNAL", text(BREAK))
    await complete("UNAUTHENTICATED", text(PROMPT), bearer(WRONG_KEY))
    await complete("UNAUTHENTICATED", text(PROMPT), (("authorization", WRONG_KEY),))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=PROMPT)])
    await complete("OK", pb.GenerationStart(chat=chat, sampling=pb.SamplingParams(max_tokens=16, ignore_eos=True)))
    for parameters in (json.dumps(TOOL["function"]), f"{{{SCHEMA}", json.dumps({SCHEMA: SCHEMA})):
        function = pb.FunctionTool(name=SCHEMA, description=SCHEMA, parameters_json=parameters)
        with_tools = pb.Chat(messages=chat.messages, tools=[pb.Tool(function=function)])
        # Whether this model's template shows tools is not the question here.
        refusals = "OK|FAILED_PRECONDITION|INVALID_ARGUMENT"
        await complete(refusals, pb.GenerationStart(chat=with_tools, sampling=pb.SamplingParams(max_tokens=4)))
    variables = pb.Chat(messages=chat.messages, template_variables_json=f'{{"{SCHEMA}": ')
    await complete("INVALID_ARGUMENT", pb.GenerationStart(chat=variables))

    for constraint in (
        Constraint(json_schema=f'{{"{SCHEMA}": '),
        Constraint(json_schema=json.dumps({"type": SCHEMA, "not": {"title": SCHEMA}})),
        Constraint(regex=f"(?={SCHEMA})a"),
        Constraint(lark=f"start: {SCHEMA}"),
        Constraint(gbnf=f"root ::= {SCHEMA}"),
    ):
        await complete("INVALID_ARGUMENT", pb.GenerationStart(text=PROMPT, constraint=constraint))
    any_value = Constraint(json_schema=json.dumps({"title": SCHEMA}))
    await complete(
        "OK", pb.GenerationStart(text=PROMPT, constraint=any_value, sampling=pb.SamplingParams(max_tokens=32))
    )

    raw = channel.unary_unary("/penstock.v1.GenerationService/Complete")
    await service.expect("INVALID_ARGUMENT", raw(b"\x0a\xff\xff" + PROMPT.encode(), metadata=mine))

    one = generation.GenerateOne(pb.GenerateOneRequest(start=text(PROMPT)), metadata=mine)
    service.outputs.append("".join([delta.text async for message in one for delta in message.deltas]))
    starts = [text(PROMPT), text(PROMPT, top_p=9), text(BREAK)]
    for ref, start in enumerate(starts, 1):
        start.ref = ref
    stream = generation.Generate(iter([pb.GenerateRequest(start=start) for start in starts]), metadata=mine)
    texts: dict[int, str] = defaultdict(str)
    async for message in stream:
        for delta in message.deltas:
            texts[delta.ref] += delta.text
        service.statuses += [str(finished.status) for finished in message.finished]

    service.outputs += texts.values()
    tokenizer = TokenizerServiceStub(channel)
    tokens = await tokenizer.Tokenize(pb.TokenizeRequest(text=PROMPT), metadata=mine)
    await service.expect("INTERNAL", tokenizer.Tokenize(pb.TokenizeRequest(text=BREAK), metadata=mine))
    await tokenizer.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids), metadata=mine)
    await tokenizer.RenderChat(pb.RenderChatRequest(chat=chat), metadata=mine)
    embed = pb.EmbedRequest(inputs=[pb.EmbedInput(text=PROMPT)])
    await EmbeddingServiceStub(channel).Embed(embed, metadata=mine).read()
    score = pb.ScoreRequest(queries=[PROMPT], documents=[PROMPT])
    await service.expect("FAILED_PRECONDITION", ClassificationServiceStub(channel).Score(score, metadata=mine))


async def call_the_gateway(service):
    """The same, over HTTP."""
    messages = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16}
    answer = json.loads(await service.post("/v1/chat/completions", messages, 200))
    service.outputs.append(answer["choices"][0]["message"]["content"])
    await service.post("/v1/chat/completions", {**messages, "stream": True}, 200)
    await service.post("/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": 4}, 200)
    await service.post("/v1/completions", {"model": "demo", "prompt": BREAK}, 500)
    await service.post("/v1/completions", {"model": "demo", "prompt": PROMPT}, 401, key=WRONG_KEY)
    await service.post("/v1/completions", {"model": "demo", "prompt": PROMPT, "temperature": PROMPT}, 400)
    await service.post("/v1/completions", {"model": "demo", "prompt": {SCHEMA: PROMPT}}, 400)
    await service.post("/v1/completions", f'{{"prompt": "{PROMPT}", {SCHEMA}'.encode(), 400)
    for schema, status in (({"title": SCHEMA}, 200), ({"properties": {SCHEMA: {"not": {"title": SCHEMA}}}}, 400)):
        response_format = {"type": "json_schema", "json_schema": {"name": "look", "schema": schema}}
        await service.post("/v1/chat/completions", {**messages, "response_format": response_format}, status)
    await service.post("/v1/chat/completions", {**messages, "tools": [TOOL], "tool_choice": "required"}, 200)
    await service.post("/v1/chat/completions", {**messages, "tools": [{"type": SCHEMA}]}, 400)
    await service.post("/tokenize", {"model": "demo", "prompt": PROMPT}, 200)
    await service.post("/v1/embeddings", {"model": "demo", "input": PROMPT}, 200)
    await service.post("/v1/rerank", {"query": PROMPT, "documents": [PROMPT]}, 400)
    await service.post("/v1/rerank", {"query": PROMPT, "documents": [{SCHEMA: PROMPT}]}, 400)


async def crash_the_worker(service, channel):
    """While it computes; the stream goes on afterwards."""
    start = text(PROMPT, max_tokens=600)
    call = GenerationServiceStub(channel).GenerateOne(pb.GenerateOneRequest(start=start), metadata=bearer(KEY))
    has_crashed, output = False, ""
    async for message in call:
        output += "".join(delta.text for delta in message.deltas)
        if output and not has_crashed:
            has_crashed = True
            workers = psutil.Process(service.process.pid).children()
            (worker,) = (child for child in workers if "penstock.models.worker.main" in " ".join(child.cmdline()))
            worker.send_signal(signal.SIGABRT)
    assert has_crashed
    service.outputs.append(output)
    assert message.finished.timings.restarts == 1


async def ask_the_administration(service):
    """What it says of all that."""
    async with grpc.aio.insecure_channel(service.addresses["admin"]) as channel:
        admin, operator = AdminServiceStub(channel), bearer(ADMIN_KEY)
        stats: Any = await admin.WatchStats(pb.WatchStatsRequest(), metadata=operator).read()
        said = json_format.MessageToJson(stats)
        for request_id in set(re.findall(r'"request_id": "(\w+)"', service.log.read_text())):
            with suppress(grpc.aio.AioRpcError):  # those that were refused have no timeline
                answer = await admin.Explain(pb.ExplainRequest(request_id=request_id), metadata=operator)
                said += json_format.MessageToJson(answer)
        denied = admin.GetSettings(pb.GetSettingsRequest(), metadata=bearer(KEY))
        await service.expect("PERMISSION_DENIED", denied)
        return said


async def test_no_log_metric_or_status_contains_prompts_or_outputs(service):
    async with grpc.aio.insecure_channel(service.addresses["grpc"]) as channel:
        await call_the_service(service, channel)
        await call_the_gateway(service)
        await crash_the_worker(service, channel)
    told = {
        "the administration": await ask_the_administration(service),
        "metrics": await get_metrics(service.addresses["metrics"]) + await get_metrics(service.addresses["http"]),
        "statuses": "\n".join(service.statuses),
    }
    service.process.terminate()
    await asyncio.wait_for(service.process.wait(), 120)
    told["logs"] = service.log.read_text(errors="replace")

    outputs = {output.strip()[:40] for output in service.outputs if len(output.strip()) >= 20}
    assert len(outputs) >= 4
    for where, words in told.items():
        assert "canary" not in words.lower(), f"{where}: {around(words, 'canary')}"
        for output in outputs:
            assert output not in words, f"{where}: {around(words, output)}"

    # Nothing was found where there was something to be found.
    assert told["metrics"].count('\nvllm:request_success_total{engine="0",finished_reason="length"') == 2
    assert told["statuses"].count("INTERNAL") >= 2
    assert "Fatal Python error: Aborted" in told["logs"]
    records = [json.loads(line) for line in told["logs"].splitlines() if line.startswith('{"time"')]
    assert sum("request_id" in record for record in records) >= 10
    errors = [record["exception"] for record in records if "exception" in record]
    assert len(errors) >= 3
    assert all(error.endswith("ValueError") and "in encode" in error for error in errors)


def around(words, found):
    at = words.lower().index(found.lower())
    return words[max(0, at - 200) : at + 200]
