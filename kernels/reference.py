"""Torch references of the kernels: what each computes, in the plainest form. Faster kernels are compared with these.

T is the tokens of a step, H the query heads, K the key heads (K divides H), D the head size, S the slots of a page.
"""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.wide import widened

MAX_SCORES = 1 << 18
"""Scores of one product in ``attention``: what stays in a CPU's cache."""
MIN_QUERIES = 16
"""... but not fewer queries at a time than make a product worth calling."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension, computed in at least fp32.

    ``x`` is (..., D), ``weight`` broadcasts against it; returns the shape and dtype of ``x``.
    """
    wide = widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + D/2):  y_i = x_i cos_i - x_j sin_i,  y_j = x_j cos_i + x_i sin_i.

    ``x`` is (T, heads, D); ``cos`` and ``sin`` are (T, D/2) in at least fp32; returns the shape and dtype of ``x``.
    """
    assert cos.shape == sin.shape == (x.shape[0], x.shape[-1] // 2)
    low, high = widened(x).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """y = act(g) * u, where ``gate_up`` is (T, 2N) with g in the first N columns and u in the rest; returns (T, N).

    ``activation`` is silu: g sigmoid(g); gelu: g Phi(g); or gelu_tanh: its approximation by tanh.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    assert activation in ("gelu", "gelu_tanh"), activation
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def write_kv(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """pages[k, slots[t] // S, slots[t] % S] = values[t, k], in place.

    ``pages`` is (K, pages, S, D) and contiguous, ``slots`` (T,) int64 without repetition, ``values`` (T, K, D).
    """
    num_heads, _, _, head_dim = pages.shape
    assert values.shape == (slots.shape[0], num_heads, head_dim)
    pages.view(num_heads, -1, head_dim).index_copy_(1, slots, values.transpose(0, 1))


def gather_kv(pages: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
    """Copies pages into rows: ``pages`` (K, pages, S, D), ``table`` (B, N) int64 of page ids; returns (K, B, N * S, D).

    ``out``, of K * B * N * S * D elements, takes the copy if it is given.
    """
    num_heads, _, slots, head_dim = pages.shape
    rows, num_pages = table.shape
    if out is not None:
        out = out.view(num_heads, rows * num_pages, slots, head_dim)
    gathered = torch.index_select(pages, 1, table.flatten(), out=out)
    return gathered.view(num_heads, rows, num_pages * slots, head_dim)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, reach: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each query head h with its key head, h * K // H; the softmax in at least fp32.

    ``query`` is (B, Q, H, D), ``key`` and ``value`` (K, B, L, D), ``mask`` (B, Q, L) bool: true where the query sees
    the key; None: everything. Masked values must be finite. ``reach`` promises that query i of every row sees no key
    from ``reach + i`` on, which need not be computed then. Returns (B, Q, H, D).
    """
    rows, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, _, num_keys, _ = key.shape
    group = num_heads // num_kv_heads
    hidden = torch.zeros((), dtype=torch.bool, device=query.device) if mask is None else ~mask
    # (K, B, G, Q, D): the queries of all heads of a group are multiplied with their keys at once.
    scaled = (query * head_dim**-0.5).view(rows, num_queries, num_kv_heads, group, head_dim).permute(2, 0, 3, 1, 4)
    if num_queries == 1:
        scores = widened(torch.matmul(scaled.squeeze(3), key.transpose(2, 3))).masked_fill_(hidden, -math.inf)
        mixed = torch.matmul(scores.softmax(-1).to(value.dtype), value)
        return mixed.transpose(0, 1).reshape(query.shape)
    hidden = hidden.expand(rows, num_queries, num_keys).unsqueeze(1)
    out = torch.empty_like(scaled, memory_format=torch.contiguous_format)
    step = max(MIN_QUERIES, MAX_SCORES // (rows * group * num_keys))
    for head, begin in itertools.product(range(num_kv_heads), range(0, num_queries, step)):
        queries = slice(begin, min(begin + step, num_queries))
        seen = slice(num_keys if reach is None else min(num_keys, reach + queries.stop - 1))
        part = scaled[head, :, :, queries].reshape(rows, -1, head_dim)
        # Keys times queries: a product packs its right side, which for few queries would be most of the work.
        scores = widened(torch.matmul(key[head, :, seen], part.transpose(1, 2))).transpose(1, 2).contiguous()
        scores.view(rows, group, -1, scores.shape[-1]).masked_fill_(hidden[:, :, queries, seen], -math.inf)
        mixed = torch.matmul(scores.softmax(-1).to(value.dtype), value[head, :, seen])
        out[head, :, :, queries] = mixed.view(rows, group, -1, head_dim)
    return out.permute(1, 3, 0, 2, 4).reshape(query.shape)


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: list[list[int]],
    query_spans: list[tuple[int, int]],
    starts: list[int],
    window: int | None,
) -> Tensor:
    """Ragged causal attention over paged KV, a row at a time: the reference for every batched form of it.

    Row r's queries are ``query[begin:end]`` with (begin, end) = ``query_spans[r]``, at positions ``starts[r]`` onward;
    its keys lie in the pages ``tables[r]``. Query position p sees key positions s with s <= p and, with a window w,
    s > p - w. ``query`` is (T, H, D), pages are (K, pages, S, D); returns (T, H, D).
    """
    out = torch.empty_like(query)
    for table, (begin, end), start in zip(tables, query_spans, starts, strict=True):
        length = start + end - begin
        ids = torch.tensor([table], device=query.device)
        keys = gather_kv(key_pages, ids)[:, :, :length]
        values = gather_kv(value_pages, ids)[:, :, :length]
        at = torch.arange(start, length, device=query.device).unsqueeze(1)
        seen = torch.arange(length, device=query.device).unsqueeze(0)
        mask = visible(at, seen, window).unsqueeze(0)
        out[begin:end] = attention(query[begin:end].unsqueeze(0), keys, values, mask)[0]
    return out


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees: ``key <= query``, and ``key > query - window`` where there is a window. Broadcasts."""
    mask = key_positions <= query_positions
    return mask if window is None else mask & (key_positions > query_positions - window)
