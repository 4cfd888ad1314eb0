"""Turns a batch's last hidden states into its result: tokens, prompts' log-probabilities, and pooled vectors."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.models.backends.torch_common.sampler import log_softmax, sample_positions, split_logprobs
from penstock.models.batch.batch import Batch, BatchResult, Sampled, join_logprobs
from penstock.models.batch.rows import Row
from penstock.scheduler.plan import PromptLogprobsPart

MAX_LOGITS = 1 << 24
"""The limit of entries in the logits of prompt tokens held at a time."""

Head = Callable[[Tensor], Tensor]
"""(N, hidden) -> (N, tokenizer's vocabulary), in at least fp32. The caller may change the result."""


def result_of(batch: Batch, hidden: Tensor, head: Head, vocab_size: int) -> BatchResult:
    """Returns a batch's result. ``hidden`` is (T, hidden) after the last norm; logits have at most ``vocab_size``
    columns."""
    add_to_vectors(batch, hidden)
    sampled: list[Sampled] = []
    if batch.sampled:
        sampled = sample_positions(head(hidden[batch.sampled_tokens.tolist()]), batch.sampled, batch.masks)
    return BatchResult(sampled, prompt_parts(batch, hidden, head, vocab_size))


def prompt_parts(batch: Batch, hidden: Tensor, head: Head, vocab_size: int) -> list[PromptLogprobsPart]:
    """Returns the log-probabilities of prompts that this batch computes; the arguments are those of ``result_of``."""
    parts = []
    for row, first, count, position in batch.prompt_spans():
        parts += _prompt_logprobs(row, position, hidden[first : first + count], head, max(1, MAX_LOGITS // vocab_size))
    return parts


def add_to_vectors(batch: Batch, hidden: Tensor) -> None:
    """Adds the batch's hidden states to the vectors of pooled rows."""
    for pooled, first, count in batch.pooled_spans():
        pooled.add_states(hidden[first : first + count].float().cpu().numpy())


def _prompt_logprobs(row: Row, position: int, hidden: Tensor, head: Head, num_sampled: int) -> list[PromptLogprobsPart]:
    """Returns the log-probabilities of the tokens from ``position`` on, which the rows of ``hidden`` predict. The head
    runs on few of them at a time, so that a long prompt with a large vocabulary needs little memory."""
    parts = []
    num_top = row.sampling.prompt_logprobs or 0
    for first in range(0, len(hidden), num_sampled):
        logprobs = log_softmax(head(hidden[first : first + num_sampled]))
        at = position + first
        token_ids = row.history[at : at + len(logprobs)]
        assert max(token_ids) < logprobs.shape[1], "prompts' ids are checked against the tokenizer's vocabulary"
        targets = torch.tensor(token_ids, device=hidden.device)
        joined = join_logprobs(list(split_logprobs(logprobs, targets, [num_top] * len(targets))))
        parts.append(PromptLogprobsPart(row.number, row.epoch, at, joined))
    return parts
