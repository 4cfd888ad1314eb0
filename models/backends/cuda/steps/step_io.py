"""A step's inputs and outputs on the device, each in one array of integers, so that each needs only one copy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cuda.sampling.logprobs import MAX_TOP
from penstock.kernels.cuda.sampling.tensors import Lines
from penstock.kernels.cuda.step import StepTensors
from penstock.models.backends.cuda.steps.rows import CudaRows
from penstock.models.batch.batch import Batch, Sampled
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.scheduler.plan import TokenLogprobs

Integers = NDArray[np.int32]

ALIGNMENT = 4
"""In numbers, for parts that start at multiples of 16 bytes, as the kernels require."""


@dataclass(frozen=True)
class Size:
    """The size of a step, or of a graph that it fits into: the graph's remaining entries are empty."""

    sequences: int
    tokens: int
    sampled: int
    """The number of lines of logits; 0 only if nothing is sampled."""
    longest: int
    """The most tokens of any sequence."""
    adapted: bool = False
    """Whether tokens have LoRA adapters."""
    commits: bool = False
    """Whether recurrent states advance by tokens of which it is not certain before the step has sampled that they are
    kept."""

    @classmethod
    def of(cls, batch: Batch) -> "Size":
        """Returns the exact size of a batch."""
        sequences, tokens = len(batch.rows), len(batch.token_ids)
        counts = batch.ends - batch.starts
        commits = any(step.certain < count for step, count in zip(batch.states, counts, strict=False))
        return cls(sequences, tokens, len(batch.sampled), int(counts.max()), commits=commits)

    def fits(self, other: "Size") -> bool:
        """Whether a step of this size fits into one of the other."""
        return (
            self.sequences <= other.sequences
            and self.tokens <= other.tokens
            and self.sampled <= other.sampled
            and self.longest <= other.longest
            and self.adapted == other.adapted
            and self.commits <= other.commits
        )


class ArrayLayout:
    """The names of an array's parts, and their places."""

    def __init__(self, sizes: dict[str, int]) -> None:
        rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()]
        *starts, self.size = accumulate(rounded, initial=0)
        self.parts = {
            name: slice(start, start + size) for (name, size), start in zip(sizes.items(), starts, strict=True)
        }


class StepInputs:
    """A step's inputs, which the host writes."""

    def __init__(self, max_sequences: int, max_tokens: int, max_sampled: int, device: torch.device) -> None:
        of_sequences = dict.fromkeys(("rows", "num_queries", "kept_before"), max_sequences)
        of_lines = dict.fromkeys(
            ("line_tokens", "line_rows", "line_positions", "num_drafts", "drafts", "masks", "num_top"), max_sampled
        )
        # ``given`` comes last, since the copy ends with the step's last token.
        self._layout = ArrayLayout(
            {"num_lines": 1, "line_starts": max_sequences + 1, **of_sequences, **of_lines, "given": max_tokens}
        )
        self._array = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        self._parts = {name: self._array[part] for name, part in self._layout.parts.items()}
        self._max_lines = max_sampled
        # Computed by the device from these inputs.
        self._tokens = torch.zeros(2, -(-max_tokens // ALIGNMENT) * ALIGNMENT, dtype=torch.int32, device=device)
        self._slots = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self._query_starts = torch.zeros(max_sequences + 1, dtype=torch.int32, device=device)
        self._contexts = torch.zeros(max_sequences, dtype=torch.int32, device=device)

    def step(self, size: Size) -> StepTensors:
        sequences, tokens = size.sequences, size.tokens
        return StepTensors(
            rows=self._parts["rows"][:sequences],
            num_queries=self._parts["num_queries"][:sequences],
            given=self._parts["given"][:tokens],
            token_ids=self._tokens[0, :tokens],
            positions=self._tokens[1, :tokens],
            slots=self._slots[:tokens],
            query_starts=self._query_starts[: sequences + 1],
            contexts=self._contexts[:sequences],
        )

    def sampled(self, size: Size, mask_words: Tensor) -> Lines:
        part, end = self._parts, size.sampled
        return Lines(
            num_lines=part["num_lines"],
            rows=part["line_rows"][:end],
            positions=part["line_positions"][:end],
            num_drafts=part["num_drafts"][:end],
            masks=part["masks"][:end],
            mask_words=mask_words,
        )

    def part(self, name: str, length: int) -> Tensor:
        """Returns the beginning of another part."""
        return self._parts[name][:length]

    def clear(self) -> None:
        """Makes this a step without sequences, as warm-ups run it."""
        self._array.zero_()

    def write(self, batch: Batch, size: Size, rows: CudaRows) -> None:
        """Writes the batch as a step of that size."""
        assert len(batch.sampled) <= self._max_lines, "rows have more drafts than the config allows"
        end = self._layout.parts["given"].start + size.tokens
        pinned = self._array.is_cuda
        host = torch.zeros(end, dtype=torch.int32, pin_memory=pinned)
        array: Integers = host.numpy()
        for name, values in _values(batch, size.sequences, rows):
            begin = self._layout.parts[name].start
            array[begin : begin + len(values)] = values
        self._array[:end].copy_(host, non_blocking=pinned)


def _values(batch: Batch, sequences: int, rows: CudaRows) -> Iterator[tuple[str, "Integers | list[int]"]]:
    """Yields parts of the inputs; the rest of each part stays 0."""
    sampled, num_sampled = batch.sampled, batch.num_sampled
    queries = batch.ends - batch.starts
    line_starts = np.zeros(sequences + 1, dtype=np.int32)
    np.cumsum(num_sampled, out=line_starts[1 : len(num_sampled) + 1])
    line_starts[len(num_sampled) + 1 :] = len(sampled)
    yield "num_lines", [len(sampled)]
    yield "line_starts", line_starts
    yield "rows", [row.number for row in batch.rows]
    yield "num_queries", queries.astype(np.int32)
    # A sampled token is kept only if it is accepted: ``accept`` counts it.
    yield "kept_before", (queries - np.array(num_sampled)).astype(np.int32)
    yield "line_tokens", batch.sampled_tokens.astype(np.int32)
    yield "line_rows", [sample.row.number for sample in sampled]
    yield "line_positions", [sample.position for sample in sampled]
    yield "masks", rows.mask_lines(batch)
    yield (
        "num_top",
        [-1 if (wanted := sample.row.sampling.logprobs) is None else rows.num_top(wanted) for sample in sampled],
    )
    if len(sampled) > np.count_nonzero(num_sampled):
        # Each line of a row assumes one more draft than the line before it.
        yield (
            "num_drafts",
            (np.arange(len(sampled)) - np.repeat(line_starts[: len(num_sampled)], num_sampled)).astype(np.int32),
        )
        yield "drafts", batch.token_ids[np.minimum(batch.sampled_tokens + 1, len(batch.token_ids) - 1)].astype(np.int32)
    yield "given", batch.token_ids.astype(np.int32)


class StepOutputs:
    """A step's outputs, which the device writes."""

    def __init__(self, max_sequences: int, max_sampled: int, device: torch.device) -> None:
        self._layout = ArrayLayout(
            {
                "token_ids": max_sampled,
                "accepted": max_sequences,
                "kept": max_sequences,
                "last": max_sequences,
                "chosen": max_sampled,
                "top_ids": max_sampled * MAX_TOP,
                "top": max_sampled * MAX_TOP,
            }
        )
        self._array = torch.zeros(self._layout.size, dtype=torch.int32, device=device)

    def part(self, name: str, length: int) -> Tensor:
        """(length,) int32."""
        begin = self._layout.parts[name].start
        return self._array[begin : begin + length]

    def top_part(self, name: str, sampled: int) -> Tensor:
        """(lines, 20) int32."""
        return self.part(name, sampled * MAX_TOP).view(sampled, MAX_TOP)

    def snapshot(self, num_sampled: int, *, with_tops: bool) -> Tensor:
        """Returns a copy of what ``read`` needs, which the next step does not change."""
        if with_tops:
            return self._array.clone()
        return self._array[: self._layout.parts["chosen"].start + num_sampled].clone()

    def read(self, sampled: list[SampledPosition], snapshot: Integers, num_top: Callable[[int], int]) -> list[Sampled]:
        """Returns the lines' tokens from a snapshot on the host. ``num_top`` limits a requested number of tokens."""
        parts = self._layout.parts
        token_ids = snapshot[parts["token_ids"]][: len(sampled)].tolist()
        chosen = snapshot[parts["chosen"]].view(np.float32)
        found = []
        for index, (sample, token_id) in enumerate(zip(sampled, token_ids, strict=True)):
            wanted = sample.row.sampling.logprobs
            logprobs = None
            if wanted is not None:
                wanted = num_top(wanted)
                begin = index * MAX_TOP
                top_ids = snapshot[parts["top_ids"]][begin : begin + wanted]
                top = snapshot[parts["top"]][begin : begin + wanted].view(np.float32)
                logprobs = TokenLogprobs(wanted, [float(chosen[index])], top_ids.tolist(), top.tolist())
            found.append(Sampled(token_id, logprobs))
        return found
