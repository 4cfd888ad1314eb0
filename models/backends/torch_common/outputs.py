"""Turns a batch's last hidden states into its result: tokens, prompts' log-probabilities, and pooled vectors."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.models.backends.torch_common.device import copy_to
from penstock.models.backends.torch_common.sampler import log_softmax, sample_positions, token_logprobs, top_logprobs
from penstock.models.batch.batch import Batch, BatchResult, Sampled, join_logprobs
from penstock.models.batch.pooled_row import PooledRow
from penstock.models.batch.rows import Ids, Row
from penstock.scheduler.plan import PromptLogprobsPart

MAX_LOGITS = 1 << 24
"""The limit of entries in the logits of prompt tokens held at a time."""

Head = Callable[[Tensor], Tensor]
"""(N, hidden) -> (N, tokenizer's vocabulary), in at least fp32. The caller may change the result."""
ToHost = Callable[[Tensor], Tensor]
"""Returns a copy on the host, which may be complete only later."""


def result_of(batch: Batch, hidden: Tensor, head: Head, vocab_size: int) -> BatchResult:
    """Returns a batch's result. ``hidden`` is (T, hidden) after the last norm; logits have at most ``vocab_size``
    columns."""
    read = HiddenReads.start(batch, hidden, head, vocab_size, Tensor.cpu)
    sampled: list[Sampled] = []
    if batch.sampled:
        sampled = sample_positions(head(hidden[batch.sampled_tokens.tolist()]), batch.sampled, batch.masks)
    return BatchResult(sampled, read.finish())


def wanted_tokens(batch: Batch) -> Ids:
    """Returns the indices of the tokens whose hidden states ``result_of`` reads, ascending."""
    spans = [(first, count) for _, first, count, _ in batch.prompt_spans()]
    spans += [(first, count) for _, first, count in batch.pooled_spans()]
    return np.unique(np.concatenate([batch.sampled_tokens, *(np.arange(start, start + num) for start, num in spans)]))


@dataclass(frozen=True)
class PromptScores:
    """The log-probabilities of some tokens of a prompt, as tensors on the host."""

    row: Row
    position: int
    chosen: Tensor
    """(N,): those of the prompt's tokens from ``position`` on."""
    top_ids: Tensor
    """(N, top): the likeliest tokens."""
    top: Tensor
    """(N, top): their log-probabilities."""

    def part(self) -> PromptLogprobsPart:
        tops = [self.row.sampling.prompt_logprobs or 0] * len(self.chosen)
        joined = join_logprobs(list(token_logprobs(self.chosen, self.top_ids, self.top, tops)))
        return PromptLogprobsPart(self.row.number, self.row.epoch, self.position, joined)


@dataclass(frozen=True)
class HiddenReads:
    """What rows get from a batch's hidden states besides tokens. Neither ``start`` nor ``finish`` waits for the
    device."""

    vectors: list[tuple[PooledRow, Tensor]]
    """Pooled rows, and the states (N, hidden) in fp32 that are added to them."""
    prompts: list[PromptScores]

    @classmethod
    def start(cls, batch: Batch, hidden: Tensor, head: Head, vocab_size: int, to_host: ToHost) -> "HiddenReads":
        """Launches the computation and the copies. The arguments are those of ``result_of``."""
        vectors = [
            (pooled, to_host(hidden[first : first + count].float())) for pooled, first, count in batch.pooled_spans()
        ]
        at_a_time = max(1, MAX_LOGITS // vocab_size)
        prompts = []
        for row, first, count, position in batch.prompt_spans():
            # The head runs on few positions at a time, so that a long prompt with a large vocabulary needs little
            # memory.
            for done in range(0, count, at_a_time):
                states = hidden[first + done : first + min(done + at_a_time, count)]
                prompts.append(_prompt_scores(row, position + done, states, head, to_host))
        return cls(vectors, prompts)

    def finish(self) -> list[PromptLogprobsPart]:
        """Adds the states to the vectors of pooled rows, and returns the log-probabilities. The copies are complete."""
        for pooled, states in self.vectors:
            pooled.add_states(states.numpy())
        return [scores.part() for scores in self.prompts]


def _prompt_scores(row: Row, position: int, states: Tensor, head: Head, to_host: ToHost) -> PromptScores:
    """Returns the log-probabilities of the tokens from ``position`` on, which ``states`` predict."""
    logprobs = log_softmax(head(states))
    token_ids = row.history[position : position + len(logprobs)]
    assert max(token_ids) < logprobs.shape[1], "prompts' ids are checked against the tokenizer's vocabulary"
    scores = top_logprobs(logprobs, copy_to(states.device, token_ids), row.sampling.prompt_logprobs or 0)
    return PromptScores(row, position, *map(to_host, scores))
