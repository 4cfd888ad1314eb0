"""A model that outputs the letters of the alphabet in turn, and the frames that start and cancel its requests."""

from collections.abc import Sequence
from typing import Any

import penstock.v1 as pb
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.testing.fake_executor import FakeExecutor

ENDLESS = 4000
"""A limit on output tokens that no test waits for."""


def next_letter(history: Sequence[int], sampling: SamplingParams | None = None) -> int:
    """Returns a, b, c ... by the length of the history."""
    return ord("a") + len(history) % 26


def letters(num_prompt_tokens: int, num_tokens: int) -> str:
    """Returns the output for any prompt of this length."""
    return "".join(chr(next_letter(range(num_prompt_tokens + index))) for index in range(num_tokens))


def paced(seconds_per_step: float = 0.002, **options: Any) -> FakeExecutor:
    """A worker that takes its time, so that a request lives long enough to be interfered with."""
    return FakeExecutor(vocab_size=258, next_token=next_letter, seconds_per_step=seconds_per_step, **options)


def begin(
    ref: int = 1,
    text: str = "hello",
    max_tokens: int = 5,
    *,
    output: pb.OutputOptions | None = None,
    n: int | None = None,
    stop: Sequence[str] = (),
    seed: int | None = None,
    **fields: Any,
) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens, n=n, stop=stop, seed=seed)
    return pb.GenerateRequest(start=pb.GenerationStart(ref=ref, text=text, sampling=sampling, output=output, **fields))


def cancel(*refs: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(cancel=pb.GenerationCancel(refs=refs))
