"""One step of the worker: a plan in, a result out. Owns the rows; knows no process, no socket and no clock but its
own."""

import time

import torch
from torch import Tensor

from penstock.models.backend import Backend
from penstock.models.batch import Batch, build_batch
from penstock.models.rows import Row, RowTable
from penstock.models.sampler import Sampled, log_softmax, sample_rows, split_logprobs
from penstock.scheduler.plan import (
    AddedRow,
    Chunk,
    Decode,
    PromptLogprobsPart,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

MAX_LOGITS = 1 << 24
"""Entries of the logits of prompt tokens held at a time."""


class Runner:
    """Runs plans on a backend, strictly in order."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._rows = RowTable(backend.facts.num_blocks, backend.facts.block_size)

    def warm(self) -> None:
        """Runs a short row, so that no request pays for what a library sets up at its first use. Leaves nothing behind:
        its block is renewed before anyone has it."""
        facts = self._backend.facts
        # No position is computed that no request could have: tables end with the context.
        end = min(facts.block_size, facts.max_model_len)
        length = max(1, end - 1)
        sampling = SamplingParams(top_k=2, top_p=0.5, min_p=0.1, logprobs=1)
        self.run(
            StepPlan(0, [], [AddedRow(0, 0, [0] * length, length, 0, [0], sampling)], [], [Chunk(0, 0, length)], [])
        )
        if length < end:
            self.run(StepPlan(0, [], [], [], [], [Decode(0, 1)]))
        self.run(StepPlan(0, [0], [], [], [], []))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Applies a plan and computes it. ``waited_us`` of the result is left at 0 for the caller, who knows."""
        began = time.monotonic_ns()
        self._backend.renew(self._rows.apply(plan))
        rows: list[RowResult] = []
        parts: list[PromptLogprobsPart] = []
        if not plan.is_empty:
            batch = build_batch(self._rows, plan)
            hidden = self._backend.forward(batch)
            parts = self._prompt_logprobs(batch, hidden)
            rows = self._commit(batch, self._sample(batch, hidden))
        return StepResult(plan.step, rows, parts, 0, (time.monotonic_ns() - began) // 1000)

    def _sample(self, batch: Batch, hidden: Tensor) -> dict[int, Sampled]:
        """The next token of each row that has all its history computed, by row number."""
        samples = batch.samples
        rows = [row for row, due in zip(batch.rows, samples, strict=True) if due]
        if not rows:
            return {}
        last = [int(end) - 1 for end, due in zip(batch.token_starts[1:], samples, strict=True) if due]
        sampled = sample_rows(self._backend.logits(hidden[last]), rows)
        return {row.number: token for row, token in zip(rows, sampled, strict=True)}

    def _commit(self, batch: Batch, sampled: dict[int, Sampled]) -> list[RowResult]:
        results = []
        for row, end in zip(batch.rows, batch.ends.tolist(), strict=True):
            row.num_computed = end
            token = sampled.get(row.number)
            if token is None:
                results.append(RowResult(row.number, row.epoch, end, []))
            else:
                row.append(token.token_id)
                results.append(RowResult(row.number, row.epoch, end, [token.token_id], token.logprobs))
        return results

    def _prompt_logprobs(self, batch: Batch, hidden: Tensor) -> list[PromptLogprobsPart]:
        parts = []
        spans = zip(batch.rows, batch.starts.tolist(), batch.ends.tolist(), batch.token_starts.tolist(), strict=False)
        for row, start, end, token_start in spans:
            # Position p is told by the hidden state at p - 1.
            last = min(end, row.num_prompt_tokens - 1)
            if row.sampling.prompt_logprobs is not None and start < last:
                parts += self._row_prompt_logprobs(row, start, hidden[token_start : token_start + last - start])
        return parts

    def _row_prompt_logprobs(self, row: Row, start: int, hidden: Tensor) -> list[PromptLogprobsPart]:
        """Of the tokens after each of ``hidden``, the first of which is at position ``start``; the head runs on few
        rows at a time, so that a long prompt with a large vocabulary needs little memory."""
        parts = []
        num_rows = max(1, MAX_LOGITS // self._backend.facts.vocab_size)
        num_top = row.sampling.prompt_logprobs or 0
        for first in range(0, len(hidden), num_rows):
            piece = hidden[first : first + num_rows]
            at = start + first + 1
            logprobs = log_softmax(self._backend.logits(piece))
            told = row.history[at : at + len(piece)]
            assert max(told) < logprobs.shape[1], "prompts' ids are checked against the tokenizer's vocabulary"
            targets = torch.tensor(told, device=hidden.device)
            parts.append(PromptLogprobsPart(row.number, row.epoch, at, _joined(logprobs, targets, num_top)))
        return parts


def _joined(logprobs: Tensor, targets: Tensor, num_top: int) -> TokenLogprobs:
    """Of all lines as one."""
    joined = TokenLogprobs(min(num_top, logprobs.shape[1]), [], [], [])
    for line in split_logprobs(logprobs, targets, [num_top] * len(targets)):
        joined.chosen += line.chosen
        joined.top_token_ids += line.top_token_ids
        joined.top += line.top
    return joined
