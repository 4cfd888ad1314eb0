"""Requests whose output is known beforehand, for the tests of the scheduler: text states, and ``Received``, which
checks what a request's sink got."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import Pooling, SamplingParams, TokenLogprobs
from penstock.scheduler.planning.sequence import sampling_of_choice
from penstock.scheduler.request import (
    Embedded,
    EngineFinishReason,
    Event,
    PromptLogprobsChunk,
    Request,
    RequestAccepted,
    RequestFinished,
    SequenceDelta,
    StopMatch,
    TextDelta,
    TokensInjected,
)
from penstock.scheduler.testing.fake_worker import token_of_history, vector_of

VOCAB_SIZE, BLOCK_SIZE = 7, 4
MAX_MODEL_LEN = 44
HIDDEN_SIZE = 3
ENGINE_VOCAB_SIZE = 100
"""The vocabulary of the fake executors that engines run on."""


class PlainText:
    """Lets every token go at once."""

    def feed(self, token_id: int) -> TextDelta:
        return TextDelta(1, chr(97 + token_id))

    def finish(self) -> TextDelta:
        return TextDelta(0, "")

    def restart(self) -> None:
        pass


class HoldingText:
    """Holds tokens back until it has three, as if they made one character together."""

    def __init__(self) -> None:
        self.held = ""

    def feed(self, token_id: int) -> TextDelta:
        self.held += chr(97 + token_id)
        return self.finish() if len(self.held) == 3 else TextDelta(0, "")

    def finish(self) -> TextDelta:
        text, self.held = self.held, ""
        return TextDelta(len(text), text)

    def restart(self) -> None:
        assert not self.held


class StoppingText(HoldingText):
    """Stops at "ab"; holds an "a" back."""

    def feed(self, token_id: int) -> TextDelta:
        self.held += chr(97 + token_id)
        if self.held == "ab":
            return TextDelta(0, "", stop="ab")
        if self.held.endswith("a"):
            text, self.held = self.held[:-1], "a"
            return TextDelta(len(text), text)
        return self.finish()


TEXTS = (PlainText, HoldingText, StoppingText)


@dataclass
class Expected:
    """What one choice must bring, worked out without a scheduler."""

    token_ids: list[int]
    end: StopMatch
    num_tokens: int


def expected_choice(
    request: Request,
    index: int,
    max_model_len: int,
    vocab_size: int = VOCAB_SIZE,
    max_tokens: int | None = None,
    injected: Mapping[int, list[int]] = MappingProxyType({}),
) -> Expected:
    """``injected``: the tokens injected after this many of the output."""
    next_token = token_of_history(vocab_size)
    sampling = sampling_of_choice(request.sampling, index)
    history = list(request.prompt_token_ids)
    max_tokens = min(max_tokens or request.max_tokens, max_model_len - len(history))
    text = request.make_text()
    output: list[int] = []
    for num_before in range(max_tokens):
        if num_before in injected:
            text.finish()
            history += injected[num_before]
        token = next_token(history, sampling)
        if num_before < sampling.min_tokens:
            while token in sampling.stop_token_ids:
                token = (token + 1) % vocab_size
        history.append(token)
        output.append(token)
        if token in sampling.stop_token_ids:
            end = StopMatch(EngineFinishReason.STOP, stop_token_id=token)
            break
        released = text.feed(token)
        if released.stop is not None:
            end = StopMatch(EngineFinishReason.STOP, stop=released.stop)
            break
    else:
        end = StopMatch(EngineFinishReason.LENGTH)
    return Expected(output, end, len(output))


@dataclass
class Received:
    """A request and all that its sink got."""

    request: Request
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    chosen: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, StopMatch] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    vectors: dict[int, bytes] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)
    """What the choices' max_tokens came to be, where they were changed."""
    most_tokens: int = 0
    """The most that they ever were changed to: plans made while they were so are in flight after a later change."""
    to_inject: list[int] = field(default_factory=list)
    """What the sink has not heard of yet."""
    injected: dict[int, list[int]] = field(default_factory=dict)
    accepted: RequestAccepted | None = None
    finished: RequestFinished | None = None

    def __post_init__(self) -> None:
        self.request.sink = self.sink

    def sink(self, event: Event) -> None:
        assert self.finished is None, "an event after the end"
        match event:
            case RequestAccepted():
                assert self.accepted is None
                self.accepted = event
            case SequenceDelta():
                assert event.choice not in self.ends, "a delta after a choice's end"
                self.token_ids.setdefault(event.choice, []).extend(event.token_ids)
                self.text[event.choice] = self.text.get(event.choice, "") + event.text
                self._take_logprobs(event.choice, event.token_ids, event.logprobs)
                if event.end is not None:
                    self.ends[event.choice] = event.end
            case PromptLogprobsChunk():
                assert event.start == len(self.prompt_logprobs) + 1, "a gap or a repetition"
                self.prompt_logprobs += event.logprobs.chosen
            case Embedded():
                assert event.choice not in self.vectors, "a vector for the second time"
                self.vectors[event.choice] = event.vector
            case TokensInjected(num_before, num_tokens):
                assert num_before == len(self.token_ids.get(0, [])), "tokens are held back although others follow"
                assert num_tokens == len(self.to_inject)
                self.injected.setdefault(num_before, []).extend(self.to_inject)
                self.to_inject = []
            case RequestFinished():
                self.finished = event

    def _take_logprobs(self, choice: int, token_ids: list[int], logprobs: TokenLogprobs | None) -> None:
        assert (logprobs is None) == (self.request.sampling.logprobs is None)
        if logprobs is not None:
            assert len(logprobs.chosen) == len(token_ids)
            assert len(logprobs.top) == len(logprobs.top_token_ids) == len(token_ids) * logprobs.num_top
            self.chosen.setdefault(choice, []).extend(logprobs.chosen)

    def check_end(self) -> None:
        """Finished, with exactly what was to be expected, or with a part of it if it was ended early."""
        request = self.request
        assert self.finished is not None, "a request without an end"
        whole = self.finished.reason in (EngineFinishReason.STOP, EngineFinishReason.LENGTH)
        if request.pooling is not None:
            self._check_vectors(request.pooling, whole)
            return
        num_tokens = num_got = 0
        early_end = StopMatch(self.finished.reason)
        is_internal = self.finished.reason is EngineFinishReason.INTERNAL
        for index in range(request.n):
            limit = self.limits.get(index)
            num_injected = sum(map(len, self.injected.values()))
            room = self.max_model_len - num_injected
            expected = expected_choice(request, index, room, self.vocab_size, limit, self.injected)
            got = self.token_ids.get(index, [])
            assert got == expected.token_ids[: len(got)], f"choice {index}: {got} differs from {expected.token_ids}"
            assert not whole or got == expected.token_ids, f"choice {index}: {got} lacks of {expected.token_ids}"
            assert "".join(chr(97 + token) for token in got).startswith(self.text.get(index, "")), "text without tokens"
            assert self.ends.get(index, expected.end) in ({expected.end} if whole else {expected.end, early_end})
            assert index in self.ends or not (whole or got) or is_internal, f"choice {index}: no end"
            num_got += len(got)
            num_tokens += expected.num_tokens
            position = len(request.prompt_token_ids)
            logprobs = []
            for offset, token in enumerate(got):
                position += len(self.injected.get(offset, []))
                logprobs.append(-float(position + offset) - token / 1e6)
            assert request.sampling.logprobs is None or self.chosen.get(index, []) == logprobs
        usage = self.finished.usage
        assert usage.prompt_tokens == len(request.prompt_token_ids) + sum(map(len, self.injected.values()))
        assert usage.output_tokens <= num_tokens
        assert usage.output_tokens == (num_tokens if whole else num_got) or is_internal, "tokens without a delta"
        prompt = request.prompt_token_ids
        known_to = 0 if request.sampling.prompt_logprobs is None else len(prompt)
        known = [-float(position) - prompt[position] / 1e6 for position in range(1, known_to)]
        assert self.prompt_logprobs == known[: len(self.prompt_logprobs)]
        assert not whole or self.prompt_logprobs == known

    def _check_vectors(self, pooling: Pooling, whole: bool) -> None:
        request, finished = self.request, self.finished
        assert finished is not None
        assert finished.context is None
        assert not self.token_ids
        for index, vector in self.vectors.items():
            token_ids = request.prompt(index).token_ids
            assert vector == vector_of([token_ids[at] for at in pooling.positions(len(token_ids))], HIDDEN_SIZE)
        assert not whole or set(self.vectors) == set(range(request.n))
        assert finished.usage.prompt_tokens == request.num_prompt_tokens
        assert finished.usage.output_tokens == 0
        assert finished.usage.cached_tokens == 0 or pooling is Pooling.LAST


def make_request(
    name: str, prompt: list[int], tenant: str = "default", block_size: int = BLOCK_SIZE, **fields: Any
) -> Request:
    salt = tenant_salt("fake", tenant)
    defaults: dict[str, Any] = {"sampling": SamplingParams(), "max_tokens": 4, "make_text": PlainText}
    hashes = hash_blocks(prompt, block_size, salt)
    return Request(name, prompt, hashes, sink=lambda _: None, tenant=tenant, hash_salt=salt, **defaults | fields)


def make_prompt(length: int, first: int = 0) -> list[int]:
    return [(first + position * position // 5) % VOCAB_SIZE for position in range(length)]


def make_config(**changes: Any) -> SchedulerConfig:
    """Small limits, so that a few requests reach them."""
    return SchedulerConfig(**{"max_num_seqs": 5, "max_num_batched_tokens": 64} | changes)
