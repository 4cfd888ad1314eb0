"""Outputs for each way of writing tool calls, whole, in parts cut at every byte, and broken off at every byte.

They are described in tool_outputs/README.md.
"""

import codecs
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from texts.tool_texts import folded, take_apart, whole
from texts.written_calls import FAMILY_FORMATS

import penstock.v1 as pb
from penstock.clients.events import Delta, Finished, collect
from penstock.clients.gateway.requests.chat import build_chat
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig
from penstock.service.text.detokenizer import text_states
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

OUTPUTS = Path(__file__).parents[1] / "tool_outputs"
FORMATS = {
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "mistral_list": "mistral",
    "mistral_named": "mistral",
    "pythonic": "pythonic",
    **{name: name for name in FAMILY_FORMATS},
}
TOOLS = json.loads((OUTPUTS / "tools.json").read_text())
CHAT = "/v1/chat/completions"
DRAFTS = SpeculationConfig(DraftMethod.NGRAM, 31)
"""A step has up to 32 tokens, so that deltas differ in length, and the soak test takes a fraction of the time."""
DRAFTS = SpeculationConfig(DraftMethod.NGRAM, 31)
"""A step has up to 32 tokens, so that deltas differ in length, and the soak test takes a fraction of the time."""


class Output:
    """One of them, and what must come of it."""

    def __init__(self, kind: str, line: dict[str, Any]) -> None:
        self.tool_format = FORMATS[kind]
        self.reasoning_format = line.get("reasoning_format")
        self.in_reasoning = line.get("in_reasoning", False)
        self.text: str = line["text"]
        self.bytes = self.text.encode()
        self.content: str = line["content"]
        self.reasoning: str = line.get("reasoning", "")
        self.calls: list[tuple[str, Any]] = [(name, arguments) for name, arguments in line["calls"]]
        self.messages: list[tuple[str, str | None, str]] | None = line.get("messages")
        self.is_whole = not line.get("breaks_off", False)

    def read(self, parts):
        """What is read from it when it comes in such parts: content, reasoning, calls, whether all of these
        are whole."""
        options = {"tools": TOOLS, "in_reasoning": self.in_reasoning}
        content, reasoning, calls, is_whole = take_apart(parts, self.tool_format, self.reasoning_format, **options)
        return content, reasoning, [(name, arguments) for _, name, arguments in calls], is_whole


def load(kind):
    return [Output(kind, json.loads(line)) for line in (OUTPUTS / f"{kind}.jsonl").read_text().splitlines()]


BY_KIND = {kind: load(kind) for kind in FORMATS}
every_kind = pytest.mark.parametrize("kind", FORMATS)
every_output = pytest.mark.parametrize(
    "output", [pytest.param(each, id=f"{kind}-{at}") for kind in FORMATS for at, each in enumerate(BY_KIND[kind], 1)]
)


def meant(calls, expected):
    """The calls, with arguments as values where those are what is expected."""
    return [
        (name, arguments if isinstance(wanted, str) else json.loads(arguments))
        for (name, arguments), (_, wanted) in zip(calls, expected, strict=True)
    ]


@every_kind
def test_there_are_enough_of_each(kind):
    texts = {output.text for output in BY_KIND[kind]}
    assert len(texts) == len(BY_KIND[kind]) >= (20 if kind in FAMILY_FORMATS else 50)
    assert sum(len(output.calls) > 1 for output in BY_KIND[kind]) >= (1 if kind in FAMILY_FORMATS else 5)
    assert sum(not output.calls for output in BY_KIND[kind]) >= (2 if kind in FAMILY_FORMATS else 7)


@every_kind
def test_a_whole_output_is_what_was_meant(kind):
    for output in BY_KIND[kind]:
        content, reasoning, calls, is_whole = output.read([output.text])
        expected = (output.text, output.content, output.reasoning, output.is_whole)
        assert (output.text, content, reasoning, is_whole) == expected
        assert meant(calls, output.calls) == output.calls


def test_harmony_is_read_as_openai_harmony_reads_it():
    """The messages in these outputs are those of the official library, version 0.0.8. It reads the others in another
    way: it fails on text outside messages, and does not see a message that begins inside another."""
    outputs = [output for output in BY_KIND["harmony"] if output.messages is not None]
    assert len(outputs) > 30
    for output in outputs:
        calls = [message for message in output.messages if (message[1] or "").startswith("functions.")]
        others = [message for message in output.messages if message not in calls]
        content, thoughts, read, _ = output.read([output.text])
        assert thoughts == "\n".join(text for channel, _, text in others if channel == "analysis" and text)
        assert content == "".join(text for channel, _, text in others if channel != "analysis")
        assert read == [(to.removeprefix("functions."), text) for _, to, text in calls]


@every_kind
def test_wherever_it_is_cut_in_two_it_is_the_same(kind):
    for output in BY_KIND[kind]:
        expected = output.read([output.text])
        for at in range(1, len(output.bytes)):
            decoder = codecs.getincrementaldecoder("utf-8")()  # a character comes with its last byte
            parts = [decoder.decode(output.bytes[:at]), decoder.decode(output.bytes[at:], True)]
            assert (parts, *output.read(parts)) == (parts, *expected)


@pytest.fixture(scope="module")
def demo_tokenizer():
    return Tokenizer(Path("models/demo"))


@every_kind
def test_token_by_token_it_is_the_same(kind, byte_tokenizer, demo_tokenizer):
    """As the service gives text out: by single bytes, and by the tokens of a real vocabulary."""
    for output in BY_KIND[kind]:
        expected = output.read([output.text])
        for tokenizer, ids in ((byte_tokenizer, output.bytes), (demo_tokenizer, demo_tokenizer.encode(output.text))):
            text = text_states(tokenizer)()
            parts = [*(text.feed(token_id).text for token_id in ids), text.finish().text]
            assert "".join(parts) == output.text
            assert (parts, *output.read(parts)) == (parts, *expected)


def rest(part, of_whole):
    """What comes after the beginning that both share."""
    shared = next(
        (at for at, pair in enumerate(zip(part, of_whole, strict=False)) if pair[0] != pair[1]), len(of_whole)
    )
    return part[shared:]


@every_kind
def test_wherever_it_breaks_off_it_ends_as_text(kind):
    """Calls that were whole stay. One that had begun to be reported stays as far as it came, and is known to be half;
    of anything else no call is made, and its text is not lost."""
    for output in BY_KIND[kind]:
        check_where_it_breaks_off(output)


def check_where_it_breaks_off(output):
    _, _, all_calls, _ = output.read([output.text])
    for at in range(len(output.bytes)):
        text = output.bytes[:at].decode(errors="replace")  # a half character is U+FFFD, as the service has it
        content, reasoning, calls, is_whole = output.read([text])
        *before, last = calls or [None]
        num_before = len(before)
        assert before == all_calls[:num_before]
        if last is not None:
            name, arguments = all_calls[num_before]
            assert last[0] == name
            assert arguments.startswith(last[1].rstrip("\ufffd"))
            if is_whole:
                assert last[1] == arguments
                assert output.is_whole or num_before + 1 < len(all_calls)
            else:
                assert last[1] != arguments or not output.is_whole
        else:
            assert is_whole
            assert output.reasoning_format or content == text
        assert text.endswith(rest(content, output.content))
        assert text.endswith(rest(reasoning, output.reasoning))


def asked(output, **fields):
    """A request that is answered with this output: see ``say``."""
    called = {name: {"parameters": TOOLS[name]} for name, _ in output.calls if name in TOOLS}
    tools = [{"type": "function", "function": {"name": name, **called.get(name, {})}} for name in sorted(TOOLS)]
    messages = [{"role": "user", "content": "SAY " + output.text}]
    return {"model": "bytes", "messages": messages, "tools": tools, **fields}


def start_of(output, num_tokens):
    """The same request in the contract."""
    chat = build_chat(ChatRequest.model_validate(asked(output)))
    options = pb.OutputOptions(parse_reasoning=True, parse_tool_calls=True, format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS)
    return pb.GenerationStart(chat=chat, output=options, sampling=pb.SamplingParams(max_tokens=num_tokens))


async def over_grpc(gateway, output, num_tokens):
    """Returns the content, reasoning, calls and finish reason over gRPC, and which calls are incomplete. They are the
    same in a whole choice and in deltas, as are the tokens."""
    start = start_of(output, num_tokens)
    start.output.logprobs = 0
    async with grpc.aio.insecure_channel(gateway.target) as channel:
        stub = GenerationServiceStub(channel)
        whole_answer = await stub.Complete(pb.CompleteRequest(start=start))
        answers = [answer async for answer in stub.GenerateOne(pb.GenerateOneRequest(start=start))]
    deltas = [delta for answer in answers for delta in answer.deltas]
    (choice,) = whole_answer.choices
    events = [Delta.from_proto(delta) for delta in deltas]
    (finished,) = [answer.finished for answer in answers if answer.HasField("finished")]
    assert (finished.reason, finished.usage) == (whole_answer.finished.reason, whole_answer.finished.usage)
    assert finished.reason == choice.end.reason == deltas[-1].end.reason
    (streamed,) = collect([*events, Finished.from_proto(finished)], 1).choices
    calls = [[call.name, call.arguments_json] for call in choice.tool_calls]
    assert [[call.name, call.arguments] for call in streamed.tool_calls] == calls
    incomplete = [call.is_incomplete for call in choice.tool_calls]
    assert [call.is_incomplete for call in streamed.tool_calls] == incomplete
    assert [call.text_offset for call in streamed.tool_calls] == [call.text_offset for call in choice.tool_calls]
    assert (streamed.text, streamed.reasoning) == (choice.text, choice.reasoning)
    assert streamed.token_ids == list(choice.token_ids)
    assert streamed.logprobs is not None
    assert streamed.logprobs.text_lengths == list(choice.logprobs.text_lengths)
    assert len(choice.token_ids) == finished.usage.output_tokens
    assert sum(choice.logprobs.text_lengths) == len(choice.text)
    reason = pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    return (choice.text, choice.reasoning, calls, reason), incomplete


@pytest.fixture
async def ends_rightly(start_gateway, say):
    """Has an output cut by ``max_tokens``, a byte a token: what is streamed is what comes whole, over HTTP and gRPC,
    and the reason says ``tool_calls`` only where the model itself has ended, and no call is half."""

    gateways = {}

    async def check(output, cuts):
        formats = (output.tool_format, output.reasoning_format or "none")
        if formats not in gateways:
            service = {"tool_call_parser": formats[0], "reasoning_parser": formats[1], "speculation": DRAFTS}
            gateways[formats] = await start_gateway(say, service=service)
        gateway = gateways[formats]
        for num_tokens in cuts:
            response = await gateway.post(CHAT, **asked(output, max_tokens=num_tokens))
            answer = whole(response.json())
            assert folded(await gateway.chunks(CHAT, **asked(output, max_tokens=num_tokens))) == answer
            content, reasoning, calls, is_whole = output.read([output.bytes[:num_tokens].decode(errors="replace")])
            has_ended = num_tokens > len(output.bytes)
            reason = "length" if not has_ended else "tool_calls" if calls and is_whole else "stop"
            assert answer == (content, reasoning, [list(call) for call in calls], reason)
            found, incomplete = await over_grpc(gateway, output, num_tokens)
            assert found == answer
            assert any(incomplete) == (bool(calls) and not is_whole)

    return check


@every_kind
async def test_over_http_and_grpc_it_ends_with_the_right_reason(kind, ends_rightly):
    """Tests one with two calls, and one whose arguments break off. The soak test covers the rest."""
    two = min(
        (output for output in BY_KIND[kind] if len(output.calls) == 2 and not output.in_reasoning),
        key=lambda output: len(output.text),
    )
    length = len(two.bytes)
    await ends_rightly(two, [length // 3, 2 * length // 3, length + 1])
    for output in [output for output in BY_KIND[kind] if not output.is_whole][:1]:
        await ends_rightly(output, [len(output.bytes) + 1])


@pytest.mark.soak
@every_output
async def test_over_http_and_grpc_wherever_it_breaks_off_it_ends_with_the_right_reason(output, ends_rightly):
    if not output.in_reasoning:  # there is no prompt here that opens it
        await ends_rightly(output, range(1, len(output.bytes) + 2))
