"""Torch references of fused CUDA kernels, and of those that exist only for CUDA. T, H, K, D and S are defined as in
``penstock.kernels.reference.ops``; pages are (pages, 2, K, S, D), keys before values."""

import torch
from torch import Tensor

from penstock.kernels.reference.ops import rms_norm, rotate
from penstock.kernels.reference.upcast import upcast


def add_rms_norm(x: Tensor, delta: Tensor, eps: float, delta_weight: Tensor | None = None) -> Tensor:
    """Returns x + delta, or x + norm(delta) * delta_weight if ``delta_weight`` is given, in the shape and dtype of
    ``x``."""
    return x + (delta if delta_weight is None else rms_norm(delta, delta_weight, eps))


def rope_kv(
    qkv: Tensor,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor | None,
    norm: tuple[Tensor, Tensor, float] | None,
    scales: tuple[Tensor, Tensor] | None,
    value_eps: float | None = None,
    values_are_keys: bool = False,
) -> Tensor:
    """Norms and rotates queries and keys, stores keys and values in ``pages`` and returns the queries (T, H, D). For
    the arguments see ``cuda.rope_kv``."""
    at = positions.long()
    if pages is None:
        assert norm is not None
        query = qkv.view(len(qkv), -1, len(norm[0]))
        return rotate(rms_norm(query, norm[0], norm[2]), cosines[at], sines[at])
    _, _, num_kv_heads, page_slots, head_dim = pages.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - (1 if values_are_keys else 2) * num_kv_heads
    query, key, value = heads[:, :num_heads], heads[:, num_heads:][:, :num_kv_heads], heads[:, -num_kv_heads:]
    if norm is not None:
        query_weight, key_weight, eps = norm
        query, key = rms_norm(query, query_weight, eps), rms_norm(key, key_weight, eps)
    if value_eps is not None:
        value = rms_norm(value, torch.ones(head_dim, device=value.device), value_eps)
    query, key = rotate(query, cosines[at], sines[at]), rotate(key, cosines[at], sines[at])
    stored = slots >= 0
    page, slot = slots[stored] // page_slots, slots[stored] % page_slots
    for which, made in enumerate((key, value)):
        if scales is not None:
            limit = torch.finfo(pages.dtype).max
            made = (upcast(made) / scales[which].unsqueeze(1)).clamp(-limit, limit)
        pages[page, which, :, slot] = made[stored].to(pages.dtype)
    return query


def prepare(
    rows: list[int],
    num_queries: list[int],
    given: list[int],
    tables: list[list[int]],
    lengths: list[int],
    next_tokens: list[int],
    page_slots: int,
    vocab_size: int,
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """The token ids, positions, slots, query starts and contexts of a step. For the arguments see
    ``cuda.step.prepare``."""
    token_ids, positions, slots = [0] * len(given), [0] * len(given), [-1] * len(given)
    query_starts, contexts = [0], []
    for row, count in zip(rows, num_queries, strict=True):
        start, capacity = query_starts[-1], len(tables[0]) * page_slots
        for index in range(count):
            token = start + index
            token_id = given[token] if given[token] >= 0 else next_tokens[row]
            token_ids[token] = min(max(token_id, 0), vocab_size - 1)
            position = lengths[row] + index
            positions[token] = min(position, capacity - 1)
            page = tables[row][position // page_slots] if position < capacity else -1
            slots[token] = page * page_slots + position % page_slots if page >= 0 else -1
        query_starts.append(start + count)
        contexts.append(min(lengths[row] + count, capacity) if count else 0)
    return token_ids, positions, slots, query_starts, contexts


def commit(
    rows: list[int], num_kept: list[int], sampled: list[int], lengths: list[int], next_tokens: list[int]
) -> None:
    """Advances the rows, in place. For the arguments see ``cuda.step.commit``."""
    for row, kept, token in zip(rows, num_kept, sampled, strict=True):
        if kept:
            lengths[row] += kept
            if token >= 0:
                next_tokens[row] = token


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, order: Tensor | None) -> Tensor:
    """W = (code - zero) * scale (N, K) in at least fp32, with columns in the order of W. For the arguments see
    ``cuda.quantized.weights.pack_int4``."""
    columns = codes.shape[1]
    groups = torch.arange(columns, device=codes.device) // (group or columns)
    wide = codes.to(scales.dtype) if zeros is None else codes.to(scales.dtype) - zeros.to(scales.dtype)[:, groups]
    wide = wide * scales[:, groups]
    return wide if order is None else wide[:, torch.argsort(order)]


def narrow_inputs(x: Tensor, dtype: torch.dtype, group: int = 0) -> tuple[Tensor, Tensor]:
    """Quantises x (T, K) to a dtype of one byte, int8 or float8_e4m3fn. Returns the codes and the scales (T, groups);
    their products approximate x."""
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    parts = upcast(x).split(group or x.shape[1], dim=1)
    largest = torch.stack([part.abs().amax(1) for part in parts], dim=1)
    scales = torch.where(largest == 0, 1.0, largest / limit)
    scaled = [part / scales[:, index : index + 1] for index, part in enumerate(parts)]
    narrow = torch.cat(scaled, dim=1).clamp(-limit, limit)
    return (narrow.round() if dtype == torch.int8 else narrow).to(dtype), scales
