"""Chooses the next token of each row from its logits, vectorised over rows. What is filtered, and the noise, come from
``kernels.reference_sampling``; this knows rows and their parameters, and nothing of models."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.reference_sampling import keep_min_p, keep_top_k, keep_top_p, sample
from penstock.kernels.wide import widened
from penstock.models.batch import Sampled
from penstock.models.forbidden import forbidden_ids
from penstock.models.rows import Ids, Row
from penstock.scheduler.plan import TokenLogprobs


def sample_rows(logits: Tensor, rows: list[Row]) -> list[Sampled]:
    """The next token of each row. ``logits`` is (R, V) in at least fp32, and is changed.

    A row's token depends on its own logits, history and parameters alone. If its masks leave no token, those of
    ``min_tokens`` and ``bad_words`` are dropped. A row whose best logit is no finite number, as a broken
    model computes, gets the lowest of its ``allowed_token_ids``, or 0.
    """
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    raw = log_softmax(logits[wanted]) if wanted else None
    _penalise(logits, rows)
    _bias(logits, rows)
    _mask(logits, rows)
    token_ids = _choose(logits, rows)
    reported: dict[int, TokenLogprobs] = {}
    if raw is not None:
        tops = [rows[i].sampling.logprobs or 0 for i in wanted]
        reported = dict(zip(wanted, split_logprobs(raw, token_ids[wanted], tops), strict=True))
    return [Sampled(token_id, reported.get(i)) for i, token_id in enumerate(token_ids.tolist())]


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last dimension, in at least fp32."""
    return widened(logits).log_softmax(-1)


def split_logprobs(logprobs: Tensor, token_ids: Tensor, tops: list[int]) -> Iterator[TokenLogprobs]:
    """For each line of ``logprobs`` (R, V): the log-probability of its token, and those of its ``tops[r]``
    likeliest."""
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).tolist()
    top = torch.topk(logprobs, min(max(tops), logprobs.shape[1]), dim=1)
    ids, values = top.indices.tolist(), top.values.tolist()
    for row, wanted in enumerate(tops):
        num_top = min(wanted, logprobs.shape[1])
        yield TokenLogprobs(num_top, [chosen[row]], ids[row][:num_top], values[row][:num_top])


def _penalise(logits: Tensor, rows: list[Row]) -> None:
    """Repetition (prompt and output): x / p where x > 0, else x p. Then x - frequency * count - presence * (count > 0),
    counted over the output."""
    penalised = [(i, row.sampling, row.counts) for i, row in enumerate(rows) if row.counts is not None]
    if not penalised:
        return
    sizes = [len(counts.ids) for _, _, counts in penalised]
    ids = np.concatenate([counts.ids for _, _, counts in penalised])
    output = np.concatenate([counts.output for _, _, counts in penalised])
    at = np.repeat([i for i, _, _ in penalised], sizes)
    penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for _, p, _ in penalised]
    repetition, presence, frequency = np.repeat(np.array(penalties), sizes, axis=0).T
    # A prompt may hold ids of the model's vocabulary that the tokenizer does not have; they are never chosen.
    known = ids < logits.shape[1]
    where = tuple(torch.from_numpy(part[known]).to(logits.device) for part in (at, ids))
    factor = torch.from_numpy(repetition[known]).to(logits)
    lowered = torch.from_numpy((frequency * output + presence * (output > 0))[known]).to(logits)
    x = logits[where]
    logits[where] = torch.where(x > 0, x / factor, x * factor) - lowered


def _bias(logits: Tensor, rows: list[Row]) -> None:
    biased = [(i, row.lists) for i, row in enumerate(rows) if len(row.lists.bias)]
    if biased:
        where = _where(logits, [(i, lists.bias_ids) for i, lists in biased])
        biases = np.concatenate([lists.bias for _, lists in biased])
        logits[where] += torch.from_numpy(biases).to(logits)


def _mask(logits: Tensor, rows: list[Row]) -> None:
    """``allowed_token_ids``, then ``min_tokens`` and ``bad_words`` wherever they leave a token."""
    for i, row in enumerate(rows):
        if row.lists.allowed is not None:
            allowed = torch.from_numpy(row.lists.allowed).to(logits.device)
            kept = logits[i, allowed]
            logits[i] = -math.inf
            logits[i, allowed] = kept
    forbidden = [(i, ids) for i, row in enumerate(rows) for ids in forbidden_ids(row)]
    if not forbidden:
        return
    at, ids = _where(logits, forbidden)
    before = logits[at, ids]
    logits[at, ids] = -math.inf
    empty = (logits.amax(1) == -math.inf)[at]
    logits[at[empty], ids[empty]] = before[empty]


def _where(logits: Tensor, ids_of_rows: list[tuple[int, Ids]]) -> tuple[Tensor, Tensor]:
    """Rows and columns of the entries that rows' ids name, as an index."""
    at = np.repeat([i for i, _ in ids_of_rows], [len(ids) for _, ids in ids_of_rows])
    columns = np.concatenate([ids for _, ids in ids_of_rows])
    return torch.from_numpy(at).to(logits.device), torch.from_numpy(columns).to(logits.device)


def _choose(logits: Tensor, rows: list[Row]) -> Tensor:
    """The argmax of greedy rows, a draw for the others; (R,) int64."""
    chosen = torch.argmax(logits, dim=1)
    # A NaN counts as the largest, so the largest tells of every row that is broken.
    whole = logits.gather(1, chosen.unsqueeze(1)).squeeze(1).isfinite().tolist()
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0.0]
    if drawn:
        chosen[drawn] = _draw(logits if len(drawn) == len(rows) else logits[drawn], [rows[i] for i in drawn])
    for i, row in enumerate(rows):
        if not whole[i]:
            chosen[i] = 0 if row.lists.allowed is None else int(row.lists.allowed.min())
    return chosen


def _draw(logits: Tensor, rows: list[Row]) -> Tensor:
    """Temperature, filters, and the argmax of logits and keyed noise."""
    device = logits.device
    params = [row.sampling for row in rows]
    temperature = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=device)
    # Distances below the best are what is divided: at the lowest temperatures logits themselves would overflow.
    logits = (logits - logits.amax(1, keepdim=True)) / temperature.unsqueeze(1)
    top_k = [p.top_k if 0 < p.top_k < logits.shape[1] else 0 for p in params]
    for keep, values, neutral in (
        (keep_top_k, top_k, 0),
        (keep_top_p, [p.top_p for p in params], 1.0),
        (keep_min_p, [p.min_p for p in params], 0.0),
    ):
        filtered = [i for i, value in enumerate(values) if value != neutral]
        if filtered:
            part = logits[filtered]
            keep(part, torch.tensor([values[i] for i in filtered], device=device))
            logits[filtered] = part
    seeds = torch.tensor([_signed(p.seed) for p in params], dtype=torch.int64, device=device)
    positions = torch.tensor([len(row.history) for row in rows], dtype=torch.int64, device=device)
    return sample(logits, seeds, positions)


def _signed(seed: int) -> int:
    """The same 64 bits as torch's signed integer."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
