"""The workloads: seeded ids, and the shapes that say where an engine is good or bad. The same ids for every engine.

Ids lie in [300, 4000): below every model's vocabulary, above the special tokens. Each repetition draws new ones, so
that no prefix cache sees a prompt twice; W3's prefix is shared only within a repetition, and W6's history only within
a conversation.
"""

import random
from dataclasses import dataclass

from cpu_bench.wire import Request, Work

MIXED, OPEN_LOOP, CONVERSATIONS = "W2", "W5", "W6"

DESCRIPTIONS = {
    "W1": "16 requests at once, prompt 128, output 64",
    "W2": "16 requests at once, prompt 32 to 1024, output 16 to 128",
    "W3": "16 requests at once, 768 shared tokens and 32 of their own, output 32",
    "W4": "1 request, prompt 512, output 64",
    "W5": "requests of W2's lengths at random times, at 70 % of the rate of the best other engine on W2",
    "W6": "8 conversations of 6 turns, each with 256 new tokens of prompt and 64 of output, 2 s between turns",
}
AT_ONCE = ("W1", "W2", "W3", "W4")
"""Workloads whose requests all arrive at the same time."""
SHARED_PREFIX = {"W3": 768}
"""Tokens that all prompts of a workload begin with."""

NUM_CONVERSATIONS, TURNS, PAUSE_S = 8, 6, 2.0
TURN_PROMPT, TURN_OUTPUT = 256, 64

_LOW, _HIGH = 300, 4000


@dataclass(frozen=True)
class OpenLoop:
    """Arrivals that do not wait for earlier requests: a Poisson process."""

    requests_per_s: float
    warm_up_s: float = 60.0
    """Requests that arrive earlier do not count."""
    measured_s: float = 180.0

    def arrivals_s(self, rng: random.Random) -> list[float]:
        """Draws the times of all arrivals, in seconds from the beginning."""
        times = []
        at = rng.expovariate(self.requests_per_s)
        while at < self.warm_up_s + self.measured_s:
            times.append(at)
            at += rng.expovariate(self.requests_per_s)
        return times


def work(name: str, repetition: int, open_loop: OpenLoop | None = None) -> Work:
    """Returns the requests of a workload, and when they arrive. W5 needs ``open_loop``."""
    if name == CONVERSATIONS:
        rng = random.Random(f"{name}/{repetition}")
        requests = [(_ids(rng, TURN_PROMPT), TURN_OUTPUT) for _ in range(NUM_CONVERSATIONS * TURNS)]
        return Work(requests, turns=TURNS, pause_s=PAUSE_S)
    if name == OPEN_LOOP:
        if open_loop is None:
            raise ValueError(f"{name} needs a rate of arrivals; run {MIXED} first, or set one")
        rng = random.Random(f"{name}/{repetition}")
        arrivals_s = open_loop.arrivals_s(rng)
        return Work(_of_mixed_lengths(rng, len(arrivals_s)), arrivals_s)
    return Work(build(name, repetition))


def build(name: str, repetition: int) -> list[Request]:
    """Returns the requests of a workload that all arrive at once, or of ``warm``: a short one that touches prefill and
    decode."""
    rng = random.Random(f"{name}/{repetition}")
    match name:
        case "W1":
            return [(_ids(rng, 128), 64) for _ in range(16)]
        case "W2":
            return [(_ids(rng, num_prompt), num_output) for num_prompt, num_output in _mixed_lengths()]
        case "W3":
            prefix = _ids(rng, SHARED_PREFIX["W3"])
            return [(prefix + _ids(rng, 32), 32) for _ in range(16)]
        case "W4":
            return [(_ids(rng, 512), 64)]
        case "warm":
            return [(_ids(rng, 64), 8) for _ in range(4)]
    raise ValueError(f"no workload is called {name}; there are {', '.join(AT_ONCE)}")


def _mixed_lengths() -> list[tuple[int, int]]:
    shape = random.Random("W2/shape")
    return [(shape.randint(32, 1024), shape.randint(16, 128)) for _ in range(16)]


def _of_mixed_lengths(rng: random.Random, count: int) -> list[Request]:
    """Draws requests with all lengths of W2 in a random order, then all of them in another order, and so on. So any
    stretch of the run has the same load on average."""
    lengths: list[tuple[int, int]] = []
    while len(lengths) < count:
        lengths += rng.sample(_mixed_lengths(), k=16)
    return [(_ids(rng, num_prompt), num_output) for num_prompt, num_output in lengths[:count]]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_LOW, _HIGH) for _ in range(count)]
