"""The requests of ``penstock bench`` and their times: conversations of one or more requests, reproducible by seed.

Independent of how a service is called and what is measured.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.clients.bench.lengths import LengthDistribution, Uniform
from penstock.clients.errors import PenstockError

DEFAULT_OPTIONS: Mapping[str, object] = {"temperature": 0, "repetition_penalty": 1, "ignore_eos": True}
"""Greedy, without the model's default penalty, and of fixed length, so that two runs or two servers do the same
work."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: a conversation's next turn, or all of it."""

    number: int
    """Index in the load, from 0."""
    prompt_token_ids: Sequence[int]
    """The new part of the prompt in this turn."""
    max_tokens: int
    arrival_s: float | None = None
    """When to send it, from the start of the run, but not before the previous turn has ended. None: as soon as the
    previous turn has ended, or, for a first turn, when a slot is free."""
    conversation: str = ""
    """The conversation's name in a trace; empty for a single request."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Fields of ``GenerationStart`` and ``SamplingParams`` by name, or of the body of an HTTP request."""


@dataclass(frozen=True)
class ClosedLoop:
    """A fixed number of concurrent conversations: whenever one ends, the next one starts."""

    concurrency: int

    def __str__(self) -> str:
        return f"closed loop of {self.concurrency}"


@dataclass(frozen=True)
class OpenLoop:
    """Conversations start at random times, ``rate`` per second, regardless of earlier ones. The times between them have
    a gamma distribution with shape ``burstiness``: 1 is a Poisson process, below 1 is burstier, above 1 more even."""

    rate: float
    burstiness: float = 1.0

    def __str__(self) -> str:
        return f"{self.rate:g}/s" + ("" if self.burstiness == 1 else f", burstiness {self.burstiness:g}")


Arrivals = ClosedLoop | OpenLoop


class Workload(Protocol):
    """The requests of a run."""

    @property
    def arrivals(self) -> Arrivals | None:
        """When conversations start. None: at the times of their first requests."""

    @property
    def num_requests(self) -> int | None:
        """The total number of requests; None if unlimited."""

    def conversations(self) -> Iterator[Sequence[BenchRequest]]:
        """Yields all conversations in the order of their starts, each with its turns in order."""


@dataclass(frozen=True)
class RandomLoad:
    """Prompts of random token ids, drawn from ``seed``. A conversation's content depends only on its number, so that
    another rate, or a shorter run, sends the same prompts."""

    vocab_size: int
    """Token ids are below it."""
    arrivals: Arrivals = field(default_factory=lambda: ClosedLoop(16))
    num_requests: int | None = 100
    prompt_tokens: LengthDistribution = field(default_factory=lambda: Uniform(512, 512))
    """The prompt's length in each turn, without the shared prefix."""
    output_tokens: LengthDistribution = field(default_factory=lambda: Uniform(128, 128))
    prefix_tokens: int = 0
    """The number of tokens in the shared prefix before the first turn."""
    num_prefixes: int = 1
    """The number of different prefixes; each conversation uses one of them."""
    turns: int = 1
    """The number of consecutive requests in a conversation."""
    seed: int | str = 0
    options: Mapping[str, object] = field(default_factory=lambda: DEFAULT_OPTIONS)
    max_model_len: int | None = None
    """The limit of tokens in a conversation, if known. Lengths from an unbounded distribution are cut to it."""

    def __post_init__(self) -> None:
        """Raises PenstockError if the longest conversation does not fit."""
        most = [lengths.most or 1 for lengths in (self.prompt_tokens, self.output_tokens)]
        needed = self.prefix_tokens + self.turns * sum(most)
        if self.max_model_len is not None and needed > self.max_model_len:
            raise PenstockError(
                f"a conversation's prefix, prompts and outputs have up to {needed:,} tokens, and the model "
                f"takes {self.max_model_len:,}; lower --prompt-tokens, --output-tokens, --prefix-tokens or --turns"
            )

    def conversations(self) -> Iterator[Sequence[BenchRequest]]:
        """Yields conversations in order; ``num_requests`` may cut the last one short."""
        for index, arrival in enumerate(arrival_times(self.arrivals, self.seed)):
            left = None if self.num_requests is None else self.num_requests - index * self.turns
            if left is not None and left <= 0:
                return
            yield list(self._requests(index, arrival))[:left]

    def _requests(self, index: int, arrival: float | None) -> Iterator[BenchRequest]:
        rng = random.Random(f"{self.seed}/{index}")
        prefix = self._prefix(rng.randrange(self.num_prefixes)) if self.prefix_tokens else []
        room = None if self.max_model_len is None else (self.max_model_len - self.prefix_tokens) // self.turns
        for turn in range(self.turns):
            prompt_tokens, output_tokens = self.prompt_tokens.draw(rng), self.output_tokens.draw(rng)
            if room is not None:
                prompt_tokens = min(prompt_tokens, room - min(self.output_tokens.most or 1, room - 1))
                output_tokens = min(output_tokens, room - prompt_tokens)
            prompt = random_ids(rng, prompt_tokens, self.vocab_size)
            yield BenchRequest(
                number=index * self.turns + turn,
                prompt_token_ids=prompt if turn else prefix + prompt,
                max_tokens=output_tokens,
                arrival_s=None if turn else arrival,
                conversation=str(index) if self.turns > 1 else "",
                options=self.options,
            )

    def _prefix(self, which: int) -> list[int]:
        return random_ids(random.Random(f"{self.seed}/prefix/{which}"), self.prefix_tokens, self.vocab_size)

    def __str__(self) -> str:
        shape = [str(self.arrivals), f"prompts {self.prompt_tokens}", f"outputs {self.output_tokens}"]
        if self.prefix_tokens:
            shape.append(
                f"a prefix of {self.prefix_tokens}"
                if self.num_prefixes == 1
                else f"one of {self.num_prefixes} prefixes of {self.prefix_tokens}"
            )
        if self.turns > 1:
            shape.append(f"{self.turns} turns")
        return ", ".join([*shape, f"seed {self.seed}"])


@dataclass(frozen=True)
class WarmUp:
    """Warm-up requests: as long as the first ones of a load, but with other tokens, so that they cache nothing of the
    load."""

    load: Workload
    num_requests: int
    vocab_size: int
    arrivals: Arrivals = field(default_factory=lambda: ClosedLoop(16))

    def conversations(self) -> Iterator[Sequence[BenchRequest]]:
        """Yields conversations of one turn."""
        for number, turns in enumerate(itertools.islice(self.load.conversations(), self.num_requests)):
            ids = random_ids(random.Random(f"warm-up/{number}"), len(turns[0].prompt_token_ids), self.vocab_size)
            yield [replace(turns[0], prompt_token_ids=ids, arrival_s=None)]


def arrival_times(arrivals: Arrivals, seed: int | str) -> Iterator[float | None]:
    """Yields the start time of each conversation, in seconds from the start of the run; None in a closed loop."""
    if isinstance(arrivals, ClosedLoop):
        yield from itertools.repeat(None)
        return
    rng, now = random.Random(f"{seed}/arrivals"), 0.0
    while True:
        now += rng.gammavariate(arrivals.burstiness, 1 / (arrivals.rate * arrivals.burstiness))
        yield now


def random_ids(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    """Returns uniformly distributed token ids."""
    return rng.choices(range(vocab_size), k=num_tokens)
