"""What the choice of a token costs: the CPU library's sampler beside the torch one, on the same logits of one row.

One thread, the best of many runs, in microseconds; pin it to a core with taskset where the machine is shared.
"""

import argparse
import ctypes
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import LEVELS, Kernels, SampledToken, SamplingRow, find_kernels
from penstock.models.backends.cpu.sampling import SamplingRows
from penstock.models.backends.torch_common.sampler import sample_positions
from penstock.models.batch.rows import Row, RowTable
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.scheduler.plan import AddedRow, SamplingParams, StepPlan

SECONDS = 0.25
"""That each figure may take."""

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "top-k 20000": SamplingParams(top_k=20_000),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.2),
    "greedy, 5 log-probabilities": SamplingParams(temperature=0.0, logprobs=5),
}


def make_row(sampling: SamplingParams, vocab_size: int) -> Row:
    """A row with a history of a thousand tokens."""
    rows = RowTable(num_blocks=1, block_size=1 << 20, hidden_size=8)
    history = np.random.default_rng(1).integers(vocab_size, size=1000).tolist()
    rows.apply(StepPlan(0, [], [AddedRow(0, 0, history, 500, 0, [0], sampling)], [], [], []))
    return rows[0]


def best_us(work: Callable[[], object], prepare: Callable[[], object]) -> float:
    """The shortest run of many; preparation does not count."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        prepare()
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def measure(kernels: Kernels, own: NDArray[np.float32], sampling: SamplingParams) -> tuple[float, float]:
    """Ours, torch's."""
    vocab_size = len(own)
    row = make_row(sampling, vocab_size)
    batch = SamplingRows().gather([SampledPosition(row)])
    logits, out = own.copy(), SampledToken()
    scratch = np.empty(kernels.sampling_scratch(vocab_size) + 64, dtype=np.uint8)
    address = scratch.ctypes.data + -scratch.ctypes.data % 64
    ids, top = np.empty(batch.num_top, dtype=np.int32), np.empty(batch.num_top, dtype=np.float32)
    arguments = (
        logits.ctypes.data, vocab_size, ctypes.byref(SamplingRow.from_address(batch.address)), address,
        ctypes.byref(out), ids.ctypes.data, top.ctypes.data,
    )  # fmt: skip
    ours = best_us(lambda: kernels.sample(*arguments), lambda: np.copyto(logits, own))
    tensor = torch.from_numpy(own.copy()).unsqueeze(0)
    theirs = best_us(
        lambda: sample_positions(tensor, [SampledPosition(row)]),
        lambda: tensor.copy_(torch.from_numpy(own).unsqueeze(0)),
    )
    return ours, theirs


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--spread", type=float, default=2.0, help="standard deviation of the logits")
    parser.add_argument("--level", choices=LEVELS, help="instruction set (default: the best)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernels = find_kernels(arguments.level)
    if kernels is None:
        parser.error(f"this machine has no {arguments.level}")
    generator = np.random.default_rng(0)
    own = generator.standard_normal(arguments.vocab_size).astype(np.float32) * np.float32(arguments.spread)
    print(f"{kernels.name.decode()}, {arguments.vocab_size} logits, one row, microseconds\n")
    print(f"{'':<28}{'ours':>8}{'torch':>9}{'ratio':>8}")
    for name, sampling in CASES.items():
        ours, theirs = measure(kernels, own, sampling)
        print(f"{name:<28}{ours:>8.0f}{theirs:>9.0f}{theirs / ours:>8.1f}")


if __name__ == "__main__":
    main()
