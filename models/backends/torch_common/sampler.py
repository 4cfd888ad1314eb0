"""Chooses the token of each sampled position, vectorised over positions."""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.reference.sampling import keep_min_p, keep_top_k, keep_top_p, sample
from penstock.kernels.reference.upcast import upcast
from penstock.models.batch.batch import Sampled
from penstock.models.batch.rows import Ids
from penstock.models.batch.sampled_positions import GrammarBitmasks, SampledPosition
from penstock.scheduler.plan import TokenLogprobs


def sample_positions(
    logits: Tensor, sampled: list[SampledPosition], masks: GrammarBitmasks | None = None
) -> list[Sampled]:
    """Returns the token of each sampled position. ``logits`` is (S, V) in at least fp32, and is changed.

    A token depends only on its position's logits, history and parameters. If the masks leave no token, those of
    ``min_tokens`` and ``bad_words`` are dropped. If the best logit is not finite, as from a broken model, the result is
    the lowest token that ``allowed_token_ids`` or the grammar allows, or 0.
    """
    wanted = [i for i, sample in enumerate(sampled) if sample.row.sampling.logprobs is not None]
    raw = log_softmax(logits[wanted]) if wanted else None
    _penalise(logits, sampled)
    _bias(logits, sampled)
    lowest = _allow(logits, sampled, masks)
    _forbid(logits, sampled)
    token_ids = _choose(logits, sampled, lowest)
    reported: dict[int, TokenLogprobs] = {}
    if raw is not None:
        tops = [sampled[i].row.sampling.logprobs or 0 for i in wanted]
        scores = top_logprobs(raw, token_ids[wanted], max(tops))
        reported = dict(zip(wanted, token_logprobs(*scores, tops), strict=True))
    return [Sampled(token_id, reported.get(i)) for i, token_id in enumerate(token_ids.tolist())]


def log_softmax(logits: Tensor) -> Tensor:
    """Returns log-probabilities over the last dimension, in at least fp32."""
    return upcast(logits).log_softmax(-1)


def top_logprobs(logprobs: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log-probability of each row's token (R,), and the ids and the log-probabilities of its likeliest
    tokens (R, num_top), of (R, V)."""
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    top = torch.topk(logprobs, min(num_top, logprobs.shape[1]), dim=1)
    return chosen, top.indices, top.values


def token_logprobs(chosen: Tensor, top_ids: Tensor, top: Tensor, tops: list[int]) -> Iterator[TokenLogprobs]:
    """Yields the result of ``top_logprobs`` row by row, each with its ``tops[r]`` likeliest tokens."""
    for wanted, of_token, ids, values in zip(tops, chosen.tolist(), top_ids.tolist(), top.tolist(), strict=True):
        num_top = min(wanted, len(ids))
        yield TokenLogprobs(num_top, [of_token], ids[:num_top], values[:num_top])


def _penalise(logits: Tensor, sampled: list[SampledPosition]) -> None:
    """Applies penalties. Repetition (prompt and output): x / p where x > 0, else x p. Then x - frequency * count -
    presence * (count > 0), counted over the output."""
    penalised = [
        (i, sample.row.sampling, sample.counts) for i, sample in enumerate(sampled) if sample.counts is not None
    ]
    if not penalised:
        return
    sizes = [len(counts.ids) for _, _, counts in penalised]
    ids = np.concatenate([counts.ids for _, _, counts in penalised])
    output = np.concatenate([counts.output for _, _, counts in penalised])
    at = np.repeat([i for i, _, _ in penalised], sizes)
    penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for _, p, _ in penalised]
    repetition, presence, frequency = np.repeat(np.array(penalties), sizes, axis=0).T
    # A prompt may contain ids of the model's vocabulary that the tokenizer lacks; they are never chosen.
    known = ids < logits.shape[1]
    where = tuple(torch.from_numpy(part[known]).to(logits.device) for part in (at, ids))
    factor = torch.from_numpy(repetition[known]).to(logits)
    lowered = torch.from_numpy((frequency * output + presence * (output > 0))[known]).to(logits)
    x = logits[where]
    logits[where] = torch.where(x > 0, x / factor, x * factor) - lowered


def _bias(logits: Tensor, sampled: list[SampledPosition]) -> None:
    biased = [(i, sample.row.lists) for i, sample in enumerate(sampled) if len(sample.row.lists.bias)]
    if biased:
        where = _where(logits, [(i, lists.bias_ids) for i, lists in biased])
        biases = np.concatenate([lists.bias for _, lists in biased])
        logits[where] += torch.from_numpy(biases).to(logits)


def _allow(logits: Tensor, sampled: list[SampledPosition], masks: GrammarBitmasks | None) -> dict[int, int]:
    """Keeps only what ``allowed_token_ids`` and grammars allow. Returns each restricted position's lowest token."""
    allowed = {i: sample.row.lists.allowed for i, sample in enumerate(sampled) if sample.row.lists.allowed is not None}
    if masks is not None:
        for i, words in zip(masks.sampled, masks.words.result(), strict=True):
            bits = np.unpackbits(words.view(np.uint8), count=logits.shape[1], bitorder="little")
            allowed[i] = bits.nonzero()[0]
    for i, ids in allowed.items():
        columns = torch.from_numpy(ids).to(logits.device)
        kept = logits[i, columns]
        logits[i] = -math.inf
        logits[i, columns] = kept
    return {i: int(ids.min()) for i, ids in allowed.items()}


def _forbid(logits: Tensor, sampled: list[SampledPosition]) -> None:
    """Masks the tokens that ``min_tokens`` and ``bad_words`` forbid, wherever that leaves a token."""
    forbidden = [(i, ids) for i, sample in enumerate(sampled) for ids in sample.forbidden_ids()]
    if not forbidden:
        return
    at, ids = _where(logits, forbidden)
    before = logits[at, ids]
    logits[at, ids] = -math.inf
    empty = (logits.amax(1) == -math.inf)[at]
    logits[at[empty], ids[empty]] = before[empty]


def _where(logits: Tensor, ids_of_rows: list[tuple[int, Ids]]) -> tuple[Tensor, Tensor]:
    """Returns an index of the entries that the positions' ids name: rows and columns."""
    at = np.repeat([i for i, _ in ids_of_rows], [len(ids) for _, ids in ids_of_rows])
    columns = np.concatenate([ids for _, ids in ids_of_rows])
    return torch.from_numpy(at).to(logits.device), torch.from_numpy(columns).to(logits.device)


def _choose(logits: Tensor, sampled: list[SampledPosition], lowest: dict[int, int]) -> Tensor:
    """Returns the argmax for greedy positions and a draw for the others; (S,) int64."""
    chosen = torch.argmax(logits, dim=1)
    # argmax counts a NaN as the largest, so the largest logit is not finite in every broken row.
    whole = logits.gather(1, chosen.unsqueeze(1)).squeeze(1).isfinite().tolist()
    drawn = [i for i, sample in enumerate(sampled) if sample.row.sampling.temperature > 0.0]
    if drawn:
        chosen[drawn] = _draw(logits if len(drawn) == len(sampled) else logits[drawn], [sampled[i] for i in drawn])
    for i, is_whole in enumerate(whole):
        if not is_whole:
            chosen[i] = lowest.get(i, 0)
    return chosen


def _draw(logits: Tensor, sampled: list[SampledPosition]) -> Tensor:
    """Applies temperature and filters, and returns the argmax of logits plus keyed noise."""
    device = logits.device
    params = [each.row.sampling for each in sampled]
    temperature = torch.tensor([p.temperature for p in params], dtype=logits.dtype, device=device)
    # Divides the distances to the best logit: at the lowest temperatures the logits themselves would overflow.
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
    seeds = torch.from_numpy(np.array([p.seed for p in params], dtype=np.uint64).view(np.int64)).to(device)
    positions = torch.tensor([each.position for each in sampled], dtype=torch.int64, device=device)
    return sample(logits, seeds, positions)
