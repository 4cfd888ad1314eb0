"""A long prompt whose KV was evicted: copied back from host memory against computed again.

Two prompts take turns in a KV cache that has room for one of them, through the scheduler as a service has it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.models.worker.runner import Runner
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import Event, Request, RequestFinished, TextDelta
from penstock.scheduler.worker_config import WorkerFacts

SALT = tenant_salt("bench", "bench")
GREEDY = SamplingParams(temperature=0.0)


class IdsOnly:
    """No text."""

    def feed(self, token_id: int) -> TextDelta:
        """Lets the token go."""
        return TextDelta(1, "")

    def finish(self) -> TextDelta:
        """Holds nothing."""
        return TextDelta(0, "")

    def restart(self) -> None:
        """Does nothing: nothing is injected."""


@dataclass(frozen=True)
class Prompt:
    """One of the two."""

    token_ids: list[int]
    hashes: list[bytes]


def num_blocks(tokens: int, block_size: int) -> int:
    """That a prompt of ``tokens`` in whole blocks, and one more, takes with the token that follows it."""
    assert tokens % block_size == 0
    return tokens // block_size + 1


class Turns:
    """A scheduler and its worker, by turns, without processes between them."""

    def __init__(self, backend: Any, tokens: int, **facts: Any) -> None:
        """``backend`` has at least ``num_blocks`` of KV, and host memory for twice as many. ``facts`` go to the
        scheduler in the place of the backend's."""
        blocks = num_blocks(tokens, backend.facts.block_size)
        self.facts: WorkerFacts = replace(
            backend.facts, num_blocks=blocks, max_model_len=blocks * backend.facts.block_size, **facts
        )
        self.prompts = [self._prompt(number, tokens + 1) for number in range(2)]
        self.scheduler = Scheduler(self.facts, SchedulerConfig(max_plans_in_flight=1))
        self._backend = backend
        self._runner = Runner(backend)
        self._num_requests = 0

    def _prompt(self, number: int, length: int) -> Prompt:
        token_ids = [(number * 7919 + i * 31 + i * i) % self.facts.vocab_size for i in range(length)]
        return Prompt(token_ids, hash_blocks(token_ids, self.facts.block_size, SALT))

    def first_token(self, prompt: Prompt) -> tuple[float, int]:
        """Seconds until a request has its only token, and how many of its prompt's came from the cache."""
        ends: list[RequestFinished] = []

        def note(event: Event) -> None:
            if isinstance(event, RequestFinished):
                ends.append(event)

        self._num_requests += 1
        request = Request(
            str(self._num_requests), prompt.token_ids, prompt.hashes, GREEDY, 1, note, IdsOnly, hash_salt=SALT
        )
        began = time.perf_counter()
        self.scheduler.add_request(request)
        while not ends:
            plan = self.scheduler.schedule()
            assert plan is not None
            self.scheduler.update(self._runner.run(plan))
        return time.perf_counter() - began, ends[0].usage.cached_tokens

    def content(self, prompt: Prompt) -> list[Tensor]:
        """Its whole blocks, as they lie on the device."""
        blocks = [self.scheduler.kv.pool.find(block_hash) for block_hash in prompt.hashes]
        assert None not in blocks, "it was just used"
        return [pages[blocks].cpu() for pages in self._backend._host_pages._blocks]


@dataclass(frozen=True)
class Compared:
    """Both ways to a first token."""

    computed_s: list[float]
    restored_s: list[float]
    restored_tokens: int
    """Of a prompt, at least."""
    is_equal: bool
    """What came back is what was evicted, bit for bit."""


def compare_ways(turns: Turns, rounds: int) -> Compared:
    """In each round both prompts are computed, and then both come back."""
    computed: list[float] = []
    restored: list[tuple[float, int]] = []
    is_equal = True
    for _ in range(rounds):
        turns.scheduler.kv.flush()
        contents = []
        for prompt in turns.prompts:
            seconds, cached = turns.first_token(prompt)
            assert cached == 0
            computed.append(seconds)
            contents.append(turns.content(prompt))
        for prompt, content in zip(turns.prompts, contents, strict=True):
            restored.append(turns.first_token(prompt))
            is_equal = is_equal and _is_equal(content, turns.content(prompt))
    return Compared(computed, [seconds for seconds, _ in restored], min(cached for _, cached in restored), is_equal)


def _is_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Bit for bit: a NaN that came back would be equal."""
    return all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(one, other, strict=True))
