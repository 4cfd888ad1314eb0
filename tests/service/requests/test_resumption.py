"""Requests that continue another replica's: at any place, the rest is what the first replica would have sent, and what
no ticket allows is refused by name."""

import asyncio
import hashlib
from collections import defaultdict
from typing import Any

import grpc
import pytest

import penstock.v1 as pb
from penstock.models.checkpoint.digest import CheckpointDigest
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.identity import AllowAll, Principal
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.text.tokenizer import Tokenizer

BOTH = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS
SCRIPT = (
    "<think>so é then</think>ok <tool_cal é <tool_call>\n"
    '{"name": "f", "arguments": {"x": "é", "y": [1, 2]}}\n</tool_call>'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
)
TEMPLATE = (
    "{% if tools %}{{ tools }}{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
TOOLS = [pb.Tool(function=pb.FunctionTool(name="f", parameters_json='{"type": "object"}'))]


def hashed_byte(history, sampling):
    """A letter, or a part of one, that depends on the seed and on all before it."""
    key = f"{sampling.seed} {len(history)} {history[-30:]}".encode()
    return hashlib.sha256(key).digest()[0]


def scripted(history, sampling):
    """The next byte of the script, after the prompt that ends the last turn."""
    said = SCRIPT.encode()
    last_turn = max(at for at, token in enumerate(history) if token == 257)
    at = len(history) - last_turn - 1 - len("assistant\n")
    return said[at] if at < len(said) else 256


class Received:
    """What a caller has of a request: its deltas, added up."""

    def __init__(self, n=1):
        self.choices = [pb.ReceivedOutput() for _ in range(n)]
        self.texts, self.reasoning, self.calls = defaultdict(str), defaultdict(str), defaultdict(list)
        self.logprobs, self.lengths, self.ends = defaultdict(list), defaultdict(list), {}
        self.ticket = b""
        self.finished: Any = None

    def take(self, message):
        if message.HasField("accepted"):
            self.ticket = message.accepted.resume_ticket
        for delta in message.deltas:
            self.take_delta(delta)
        if message.HasField("finished"):
            self.finished = message.finished
        return self

    def take_delta(self, delta):
        index, choice = delta.choice, self.choices[delta.choice]
        choice.token_ids.extend(delta.token_ids)
        choice.text_chars += len(delta.text)
        choice.reasoning_chars += len(delta.reasoning)
        self.texts[index] += delta.text
        self.reasoning[index] += delta.reasoning
        self.logprobs[index] += delta.logprobs.chosen
        self.lengths[index] += delta.logprobs.text_lengths
        for call in delta.tool_calls:
            calls = self.calls[index]
            if call.index == len(calls):
                assert call.name
                choice.argument_chars = 0
                calls.append([call.name, call.text_offset, "", False])
            calls[call.index][2] += call.arguments_json
            calls[call.index][3] = call.is_incomplete
            choice.tool_calls = len(calls)
            choice.argument_chars += len(call.arguments_json)
        if delta.HasField("end"):
            choice.has_ended = True
            self.ends[index] = delta.end
        assert choice.token_ids or not delta.logprobs.chosen

    @property
    def state(self):
        """What may not depend on replicas."""
        ids = [list(choice.token_ids) for choice in self.choices]
        parts = (self.texts, self.reasoning, self.calls, self.logprobs, self.lengths, self.ends)
        kept = [{index: value for index, value in part.items() if value} for part in parts]
        finished = self.finished
        counts = finished.usage.prompt_tokens, finished.usage.output_tokens, finished.usage.reasoning_tokens
        return ids, kept, counts, finished.reason, finished.seed

    def resume(self, start):
        """The start that continues the request."""
        resumed = pb.GenerationStart()
        resumed.CopyFrom(start)
        resumed.resume_from.ticket = self.ticket
        resumed.resume_from.choices.extend(self.choices)
        return resumed


async def messages_of(service, start):
    call = service.generation.GenerateOne(pb.GenerateOneRequest(start=start))
    return [message async for message in call]


async def refused(service, start, details_of):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await messages_of(service, start)
    info = details_of(error.value)["ErrorInfo"]
    return info.reason, dict(info.metadata), error.value.details()


def resumed_everywhere(start, whole, n=1):
    """For each message of a stream, what its caller has after it."""
    for count in (*range(1, len(whole), 5), len(whole) - 1):
        received = Received(n)
        for message in whole[:count]:
            received.take(message)
        yield received


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "sampled": ({}, {}),
    "with a seed": ({"seed": 7}, {}),
    "n": ({"n": 3}, {}),
    "stop": ({"stop": ["ab", "é", *map(chr, range(1, 11))], "min_tokens": 20}, {}),
    "logprobs": ({"n": 2}, {"logprobs": 2, "include_token_texts": True}),
    "ids": ({}, {"format": pb.OUTPUT_FORMAT_TOKEN_IDS}),
    "stop token": ({"stop_token_ids": list(range(0, 256, 9)), "min_tokens": 20}, {"include_special_tokens": True}),
}


@pytest.mark.parametrize("case", CASES)
async def test_exact(start_service, case):
    """After each message, another replica sends the rest, and only that."""
    sampling, output = CASES[case]
    start = pb.GenerationStart(text="hello", sampling=pb.SamplingParams(max_tokens=40, **sampling))
    start.output.MergeFrom(pb.OutputOptions(format=BOTH))
    start.output.MergeFrom(pb.OutputOptions(**output))
    n = start.sampling.n or 1
    first = await start_service(FakeExecutor(vocab_size=258, next_token=hashed_byte, seconds_per_step=0.001))
    second = await start_service(
        FakeExecutor(vocab_size=258, next_token=hashed_byte), SchedulerConfig(enable_prefix_caching=False)
    )
    whole = await messages_of(first, start)
    undisturbed = Received(n)
    for message in whole:
        undisturbed.take(message)
    cuts = list(resumed_everywhere(start, whole, n))
    assert cuts
    for received in cuts:
        had = sum(len(choice.token_ids) for choice in received.choices)
        for message in await messages_of(second, received.resume(start)):
            received.take(message)
        assert received.state == undisturbed.state, had
    assert not second.blocks_in_use


async def two_with_tools(start_service, write_tokenizer, tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, TEMPLATE))
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    return [
        await start_service(
            FakeExecutor(vocab_size=258, next_token=scripted, seconds_per_step=0.001), tokenizer=tokenizer, **parsers
        )
        for _ in range(2)
    ]


async def test_too_little_memory_for_all(start_service):
    """Rows that are resumed are preempted and computed again like others."""
    start = pb.GenerationStart(text="hello" * 6, sampling=pb.SamplingParams(max_tokens=60, n=2))
    start.output.format = BOTH
    facts: dict[str, Any] = {"vocab_size": 258, "next_token": hashed_byte, "num_blocks": 14, "block_size": 8}
    first = await start_service(FakeExecutor(**facts, seconds_per_step=0.001))
    second = await start_service(FakeExecutor(**facts))
    whole = await messages_of(first, start)
    undisturbed = Received(2)
    for message in whole:
        undisturbed.take(message)
    cuts = list(resumed_everywhere(start, whole, 2))
    assert not second.engine.counters.resumed_requests
    rest = await asyncio.gather(*(messages_of(second, received.resume(start)) for received in cuts))
    assert second.engine.counters.resumed_requests == sum(any(each.token_ids for each in cut.choices) for cut in cuts)
    assert sum(messages[-1].finished.timings.preemptions for messages in rest)
    for received, messages in zip(cuts, rest, strict=True):
        for message in messages:
            received.take(message)
        assert received.state == undisturbed.state
    assert not second.blocks_in_use


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_parsed(start_service, write_tokenizer, tmp_path, logprobs):
    """Reasoning, text and calls go on inside markers, calls and characters."""
    first, second = await two_with_tools(start_service, write_tokenizer, tmp_path)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], tools=TOOLS)
    output = pb.OutputOptions(format=BOTH, parse_reasoning=True, parse_tool_calls=True, logprobs=logprobs)
    start = pb.GenerationStart(chat=chat, output=output, sampling=pb.SamplingParams(max_tokens=300))
    whole = await messages_of(first, start)
    undisturbed = Received()
    for message in whole:
        undisturbed.take(message)
    assert undisturbed.finished.reason == pb.FINISH_REASON_TOOL_CALLS
    assert undisturbed.reasoning[0] == "so é then"
    assert [call[2] for call in undisturbed.calls[0]] == ['{"x": "é", "y": [1, 2]}', "{}"]
    for received in list(resumed_everywhere(start, whole))[:: 1 if logprobs is None else 3]:
        for message in await messages_of(second, received.resume(start)):
            received.take(message)
        assert received.state == undisturbed.state


async def test_only_text(start_service):
    """A caller without ids has the output generated again, and gets the rest of the text."""
    start = pb.GenerationStart(text="hello", sampling=pb.SamplingParams(max_tokens=30))
    service = await start_service(FakeExecutor(vocab_size=258, next_token=hashed_byte, seconds_per_step=0.001))
    whole = await messages_of(service, start)
    undisturbed = Received()
    for message in whole:
        undisturbed.take(message)
    for received in list(resumed_everywhere(start, whole))[::3]:
        for message in await messages_of(service, received.resume(start)):
            received.take(message)
        assert received.state == undisturbed.state


async def test_resumed_again(start_service):
    """The ticket of a request that goes on is the first one, and so is its usage."""
    start = pb.GenerationStart(
        text="hello", sampling=pb.SamplingParams(max_tokens=30), output=pb.OutputOptions(format=BOTH)
    )
    service = await start_service(FakeExecutor(vocab_size=258, next_token=hashed_byte, seconds_per_step=0.001))
    whole = await messages_of(service, start)
    received = Received().take(whole[0])
    ticket, number = received.ticket, 0
    assert 1 <= len(ticket) <= 128
    assert b"hello" not in ticket
    while received.finished is None:
        more = await messages_of(service, received.resume(start))
        for message in more[:4]:
            received.take(message)
        assert received.ticket == ticket
        number += 1
    assert number
    undisturbed = Received()
    for message in whole:
        undisturbed.take(message)
    assert received.state == undisturbed.state


async def test_cached_output_is_not_prompt(start_service):
    """A service that has the output in its cache reports only the prompt's tokens as cached."""
    start = pb.GenerationStart(text="hello" * 7, sampling=pb.SamplingParams(max_tokens=60))
    start.output.format = BOTH
    service = await start_service(FakeExecutor(vocab_size=258, next_token=hashed_byte, seconds_per_step=0.001))
    received = Received()
    for message in (await messages_of(service, start))[:-1]:
        received.take(message)
    rest = await messages_of(service, received.resume(start))
    usage = rest[-1].finished.usage
    assert rest[0].accepted.cached_tokens == usage.cached_tokens == usage.prompt_tokens == 35


def begun(start, ids=(97, 98), ticket=b""):
    received = Received(start.sampling.n or 1)
    received.ticket = ticket
    received.choices[0].token_ids.extend(ids)
    received.choices[0].text_chars = len(ids)
    return received.resume(start)


async def test_refused(start_service, details_of):
    """Each by name; the service goes on."""
    service = await start_service()
    sampling, output = pb.SamplingParams(max_tokens=10, stop_token_ids=[100]), pb.OutputOptions(format=BOTH)
    start = pb.GenerationStart(text="hello", sampling=sampling, output=output)
    ticket = Received().take((await messages_of(service, start))[0]).ticket

    async def reason(resumed):
        found, _, message = await refused(service, resumed, details_of)
        return found, message

    for broken in (b"x", b"x" * 89, b"x" * 128, ticket[:-1], ticket + b"x", bytes(len(ticket)), b"\x01" + ticket[1:]):
        found, message = await reason(begun(start, ticket=broken))
        assert found == "TICKET_INVALID", broken
        assert "resume_from" in message
    for resumed, field in (
        (begun(start, ticket=b""), "resume_from.ticket"),
        (begun(start, ticket=b"x" * 129), "resume_from.ticket"),
        (begun(start, ids=[97, 258], ticket=ticket), "resume_from.choices[0].token_ids[1]"),
        (begun(start, ids=[97] * 11, ticket=ticket), "resume_from.choices[0].token_ids"),
        (begun(start, ids=[100, 97], ticket=ticket), "resume_from.choices[0].token_ids"),
        (begun(start, ids=[97] * 200_000, ticket=ticket), "resume_from.choices[0].token_ids"),
    ):
        found, message = await reason(resumed)
        assert (found, message.partition(":")[0].removeprefix("start.")) == ("INVALID_FIELD", field)
    more = begun(start, ticket=ticket)
    more.resume_from.choices.add()
    assert await reason(more) == (
        "INVALID_FIELD",
        "resume_from.choices: must have one for each of the n choices, 1; it has 2",
    )
    with_prompt_logprobs = begun(start, ticket=ticket)
    with_prompt_logprobs.output.prompt_logprobs = 1
    assert (await reason(with_prompt_logprobs))[0] == "NOT_RESUMABLE"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.generation.Complete(pb.CompleteRequest(start=begun(start, ticket=ticket)))
    assert details_of(error.value)["ErrorInfo"].reason == "NOT_RESUMABLE"
    assert (await messages_of(service, start))[-1].finished.status.code == 0


async def test_open_prompt_is_refused(open_frames):
    frames = await open_frames()
    await frames.send(pb.GenerateRequest(start=begun(pb.GenerationStart(ref=1, text="a", open=True), ticket=b"x")))
    assert frames.reason_of((await frames.finished()).status) == "NOT_RESUMABLE"


class ActsForAnyone:
    """A gateway's key."""

    def authenticate(self, metadata):
        return Principal("gateway", may_act_for_others=True)


ONE = CheckpointDigest(b"1" * 8, b"2" * 8, b"3" * 8)


@pytest.mark.parametrize(
    ("differs", "other"),
    [
        ("config", {"checkpoint": ONE._replace(config=b"x" * 8)}),
        ("weights", {"checkpoint": ONE._replace(weights=b"x" * 8)}),
        ("tokenizer", {"checkpoint": ONE._replace(tokenizer=b"x" * 8)}),
        ("sampling", {"sampling_defaults": SamplingDefaults(pb.SamplingParams(top_k=3))}),
        ("limits", {"sampling_defaults": SamplingDefaults(pb.SamplingParams(max_tokens=3))}),
        ("limits", {"executor": {"max_model_len": 64}}),
        ("numerics", {"executor": {"instruction_set": "avx2"}}),
        ("numerics", {"executor": {"dtype": "bfloat16"}}),
        ("tenant", {"start": {"tenant": "other"}, "authenticator": ActsForAnyone()}),
        ("prompt", {"start": {"text": "hallo"}}),
        ("sampling", {"sampling": {"top_p": 0.5}}),
        ("sampling", {"sampling": {"seed": 5}}),
        ("output", {"sampling": {"stop": ["zz"]}}),
        ("output", {"start": {"output": pb.OutputOptions(include_special_tokens=True)}}),
        ("output", {"start": {"constraint": pb.Constraint(regex="[a-z]*")}}),
    ],
)
async def test_another_replica(start_service, details_of, differs, other):
    """The refusal names what differs."""
    first = await start_service(checkpoint=ONE, authenticator=other.get("authenticator", AllowAll()))
    start = pb.GenerationStart(text="hello", sampling=pb.SamplingParams(max_tokens=10))
    ticket = Received().take((await messages_of(first, start))[0]).ticket
    executor = FakeExecutor(vocab_size=258, **other.pop("executor", {}))
    start.sampling.MergeFrom(pb.SamplingParams(**other.pop("sampling", {})))
    start.MergeFrom(pb.GenerationStart(**other.pop("start", {})))
    second = await start_service(executor, **{"checkpoint": ONE, **other})
    reason, metadata, message = await refused(second, begun(start, ticket=ticket), details_of)
    assert (reason, metadata["differs"]) == ("TICKET_MISMATCH", differs)
    assert message.startswith("resume_from.ticket: it is for ")


CALLED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
STRICT = [pb.Tool(function=pb.FunctionTool(name="f", parameters_json='{"type": "object"}', strict=True))]


@pytest.mark.parametrize(
    "other",
    [
        {"chat": {"tool_choice": CALLED}},
        {"chat": {"parallel_tool_calls": False}},
        {"chat": {"tools": STRICT}},
        {"output": {"parse_tool_calls": False}},
        {"output": {"parse_reasoning": False}},
        {"config": {"tool_call_parser": "pythonic"}},
        {"config": {"reasoning_parser": "none"}},
    ],
    ids=repr,
)
async def test_another_output(start_service, write_tokenizer, tmp_path, details_of, other):
    """Its text would be divided otherwise, and what its caller received would not be the beginning of its parts."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path, TEMPLATE))
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "think"}

    def begin(chat=None, output=None, config=None):
        message = pb.ChatMessage(role="user", content="hi")
        return pb.GenerationStart(
            chat=pb.Chat(**{"messages": [message], "tools": TOOLS} | (chat or {})),
            output=pb.OutputOptions(**{"parse_tool_calls": True, "parse_reasoning": True} | (output or {})),
            sampling=pb.SamplingParams(max_tokens=5),
        )

    first = await start_service(tokenizer=tokenizer, **parsers)
    received = Received().take((await messages_of(first, begin()))[0])
    assert (await messages_of(first, received.resume(begin())))[-1].finished.status.code == 0
    second = await start_service(tokenizer=tokenizer, **parsers | other.get("config", {}))
    reason, metadata, _ = await refused(second, received.resume(begin(**other)), details_of)
    assert (reason, metadata["differs"]) == ("TICKET_MISMATCH", "output")


async def test_worker_dies_with_resumed_rows(start_service):
    """Rows that are resumed survive a worker that dies at once, like others."""
    start = pb.GenerationStart(text="hello", sampling=pb.SamplingParams(max_tokens=40, n=2))
    start.output.format = BOTH
    first = await start_service(FakeExecutor(vocab_size=258, next_token=hashed_byte, seconds_per_step=0.001))
    crashes = iter([True])
    kills = FakeExecutor(vocab_size=258, next_token=hashed_byte, kills=lambda row: next(crashes, False))
    second = await start_service(kills)
    whole = await messages_of(first, start)
    undisturbed, received = Received(2), Received(2)
    for message in whole:
        undisturbed.take(message)
    for message in whole[: len(whole) // 2]:
        received.take(message)
    for message in await messages_of(second, received.resume(start)):
        received.take(message)
    assert second.engine.stats().restarts
    assert received.state == undisturbed.state
