"""Requests that continue another replica's: at any place, the rest is what the first replica would have sent."""

import asyncio
import hashlib
from collections import defaultdict
from typing import Any

import pytest
from wire.resumption import messages_of

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.testing.fake_executor import FakeExecutor
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
