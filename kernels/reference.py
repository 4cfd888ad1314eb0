"""Torch references of the kernels: what each computes, in the plainest form. Faster kernels are compared with these.

T is the tokens of a step, H the query heads, K the key heads (K divides H), D the head size, S the slots of a page.
"""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.wide import widened


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
    """pages[slots[t] // S, slots[t] % S] = values[t], in place.

    ``pages`` is (pages, S, K, D) and contiguous, ``slots`` (T,) int64 without repetition, ``values`` (T, K, D).
    """
    assert values.shape == (slots.shape[0], *pages.shape[2:])
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots, values)


def gather_kv(pages: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
    """Copies pages into rows: ``table`` (B, N) int64 of page ids, ``pages`` (pages, S, K, D); returns (B, N * S, K,
    D)."""
    rows, num_pages = table.shape
    gathered = torch.index_select(pages, 0, table.flatten(), out=out)
    return gathered.view(rows, num_pages * pages.shape[1], *pages.shape[2:])


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each query head with its key head, h * K // H.

    ``query`` is (B, Q, H, D), ``key`` and ``value`` (B, L, K, D), ``mask`` (B, Q, L) bool: true where the query sees
    the key; None: everything. Masked keys must be finite. Returns (B, Q, H, D).
    """
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if query.shape[1] == 1:
        # The heads of a group become queries of their key head: no copies of keys, and torch's fast path in every
        # dtype.
        folded = query.view(query.shape[0], num_kv_heads, num_heads // num_kv_heads, query.shape[3])
        mixed = functional.scaled_dot_product_attention(
            folded, key, value, attn_mask=None if mask is None else mask.unsqueeze(1)
        )
        return mixed.reshape(query.shape)
    mixed = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key,
        value,
        attn_mask=None if mask is None else mask.unsqueeze(1),
        enable_gqa=num_heads != num_kv_heads,
    )
    return mixed.transpose(1, 2)


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
    its keys lie in the pages ``tables[r]``. Query position p sees key positions s with s <= p and, with a window w, s >
    p - w. ``query`` is (T, H, D), pages are (pages, S, K, D); returns (T, H, D).
    """
    out = torch.empty_like(query)
    for table, (begin, end), start in zip(tables, query_spans, starts, strict=True):
        length = start + end - begin
        ids = torch.tensor([table], device=query.device)
        keys = gather_kv(key_pages, ids)[:, :length]
        values = gather_kv(value_pages, ids)[:, :length]
        at = torch.arange(start, length, device=query.device).unsqueeze(1)
        seen = torch.arange(length, device=query.device).unsqueeze(0)
        mask = visible(at, seen, window).unsqueeze(0)
        out[begin:end] = attention(query[begin:end].unsqueeze(0), keys, values, mask)[0]
    return out


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees: ``key <= query``, and ``key > query - window`` where there is a window. Broadcasts."""
    mask = key_positions <= query_positions
    return mask if window is None else mask & (key_positions > query_positions - window)
