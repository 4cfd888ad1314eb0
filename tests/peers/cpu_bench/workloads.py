"""The workloads: seeded ids, and the shapes that say where an engine is good or bad. The same ids for every engine.

Ids lie in [300, 4000): below every model's vocabulary, above the special tokens. Each repetition draws new ones, so
that no prefix cache sees a prompt twice; W3's prefix is shared within a repetition alone.
"""

import random

from cpu_bench.wire import Request

DESCRIPTIONS = {
    "W1": "16 requests at once, prompt 128, output 64",
    "W2": "16 requests at once, prompt 32 to 1024, output 16 to 128",
    "W3": "16 requests at once, 768 shared tokens and 32 of their own, output 32",
    "W4": "1 request, prompt 512, output 64",
}
SHARED_PREFIX = {"W3": 768}
"""Tokens that all prompts of a workload begin with."""

_LOW, _HIGH = 300, 4000


def build(name: str, repetition: int) -> list[Request]:
    """The requests of a workload, or of ``warm``: a short one that touches prefill and decode."""
    rng = random.Random(f"{name}/{repetition}")
    match name:
        case "W1":
            return [(_ids(rng, 128), 64) for _ in range(16)]
        case "W2":
            shape = random.Random("W2/shape")
            lengths = [(shape.randint(32, 1024), shape.randint(16, 128)) for _ in range(16)]
            return [(_ids(rng, num_prompt), num_output) for num_prompt, num_output in lengths]
        case "W3":
            prefix = _ids(rng, SHARED_PREFIX["W3"])
            return [(prefix + _ids(rng, 32), 32) for _ in range(16)]
        case "W4":
            return [(_ids(rng, 512), 64)]
        case "warm":
            return [(_ids(rng, 64), 8) for _ in range(4)]
    raise ValueError(f"no workload is called {name}; there are {', '.join(DESCRIPTIONS)}")


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_LOW, _HIGH) for _ in range(count)]
