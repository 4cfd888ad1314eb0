"""Torch references of the kernels, in the plainest form. Tests compare the fast kernels with these.

T is the number of tokens in a step, H of query heads, K of key heads (K divides H), D the head size, and S the number
of slots in a page.
"""

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.reference.upcast import upcast

MAX_SCORES = 1 << 18
"""Scores computed by one product in ``attention``: as many as stay in a CPU's cache."""
MIN_QUERIES = 16
"""The minimum number of queries per product in ``attention``. Fewer do not pay for the call."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension, computed in at least fp32.

    ``x`` is (..., D), ``weight`` broadcasts against it, and is multiplied in its own dtype; returns the shape and dtype
    of ``x``.
    """
    wide = upcast(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension, computed in at least fp32;
    shapes as those of ``rms_norm``."""
    wide = upcast(x)
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs (i, i + N) of the first 2N dimensions, N at most D/2; the others are kept:
    y_i = x_i cos_i - x_j sin_i,  y_j = x_j cos_i + x_i sin_i.

    ``x`` is (T, heads, D); ``cos`` and ``sin`` are (T, N) in at least fp32; returns the shape and dtype of ``x``.
    """
    half = cos.shape[1]
    assert cos.shape == sin.shape == (x.shape[0], half)
    low, high = upcast(x[..., :half]), upcast(x[..., half : 2 * half])
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)


def activate(x: Tensor, activation: str) -> Tensor:
    """``activation`` is silu: x sigmoid(x); gelu: x Phi(x); gelu_tanh: its approximation by tanh; relu: max(x, 0); or
    relu_squared."""
    match activation:
        case "silu":
            return functional.silu(x)
        case "relu":
            return functional.relu(x)
        case "relu_squared":
            return functional.relu(x).square()
    assert activation in ("gelu", "gelu_tanh"), activation
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """y = act(g) * u, where ``gate_up`` is (T, 2N) with g in the first N columns and u in the rest; returns (T, N). For
    ``activation`` see ``activate``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation) * up


def clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """y = g sigmoid(alpha g) (u + 1), g being at most ``limit`` and u from -limit to limit; shapes as those of
    ``gated_activation``."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """y = cap tanh(x / cap)."""
    return torch.tanh(x / cap) * cap


def choose_experts(
    logits: Tensor,
    num_chosen: int,
    normalise: bool,
    *,
    num_groups: int = 1,
    groups_chosen: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The ``num_chosen`` likeliest experts by a router's ``logits`` (T, E), ties broken by lowest number, and their
    probabilities times ``scale`` in at least fp32, both (T, num_chosen). They are chosen from the ``groups_chosen`` of
    the groups that have the likeliest experts. ``normalise`` divides the chosen probabilities by their sum."""
    ranked = logits
    if num_groups > 1:
        groups = logits.unflatten(-1, (num_groups, -1))
        ranked = _in_best_groups(groups, groups.amax(-1), groups_chosen)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    probabilities = upcast(logits).softmax(-1).gather(-1, chosen)
    factors = probabilities / probabilities.sum(-1, keepdim=True) if normalise else probabilities
    return chosen, factors * scale


def _in_best_groups(ranks: Tensor, scores: Tensor, groups_chosen: int) -> Tensor:
    """Replaces the ``ranks`` (T, groups, experts) in all groups but those with the highest ``scores`` (T, groups) by
    -infinity; returns (T, E)."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices
    hidden = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, best[:, :groups_chosen], False)
    return ranks.masked_fill(hidden.unsqueeze(-1), -math.inf).flatten(1)


def choose_experts_by_sigmoid(
    logits: Tensor,
    bias: Tensor | None,
    num_chosen: int,
    *,
    num_groups: int,
    groups_chosen: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's choice (arXiv 2412.19437) of experts by the sigmoids of a router's ``logits`` (T, E).

    Sigmoids plus ``bias`` (E,) decide: first on ``groups_chosen`` of the groups, by the sum of a group's two largest,
    then on the experts of these; ties go to the lowest number. With one group and no bias, the logits decide: they
    still differ where sigmoids round to the same number. Returns the chosen experts and their factors, both (T,
    num_chosen): the sigmoids without the bias, divided by their sum if ``normalise`` is set, times ``scale``.
    """
    scores = upcast(logits).sigmoid()
    ranked = scores if bias is None else scores + bias
    if num_groups == 1 and bias is None:
        ranked = logits
    elif num_groups > 1:
        groups = ranked.unflatten(-1, (num_groups, -1))
        ranked = _in_best_groups(groups, groups.topk(2, dim=-1).values.sum(-1), groups_chosen)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    factors = scores.gather(-1, chosen)
    # Sigmoids may all be zero; transformers adds the same number.
    return chosen, (factors / (factors.sum(-1, keepdim=True) + 1e-20) if normalise else factors) * scale


def write_kv(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """pages[k, slots[t] // S, slots[t] % S] = values[t, k], in place.

    ``pages`` is (K, pages, S, D) and contiguous, ``slots`` (T,) int64 without repetition, ``values`` (T, K, D).
    """
    num_heads, _, _, head_dim = pages.shape
    assert values.shape == (slots.shape[0], num_heads, head_dim)
    pages.view(num_heads, -1, head_dim).index_copy_(1, slots, values.transpose(0, 1))


def gather_kv(pages: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
    """Copies pages into rows: ``pages`` (K, pages, S, D), ``table`` (B, N) int64 of page ids; returns (K, B, N * S, D).

    The copy is written to ``out`` if it is given; it has K * B * N * S * D elements.
    """
    num_heads, _, slots, head_dim = pages.shape
    rows, num_pages = table.shape
    if out is not None:
        out = out.view(num_heads, rows * num_pages, slots, head_dim)
    gathered = torch.index_select(pages, 1, table.flatten(), out=out)
    return gathered.view(num_heads, rows, num_pages * slots, head_dim)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    reach: int | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v for each query head h with its key head, h * K // H; the softmax in at least fp32.

    ``query`` is (B, Q, H, D), ``key`` and ``value`` (K, B, L, D), ``mask`` (B, Q, L) bool: true where the query sees
    the key; None: everything. Masked values must be finite. ``reach`` promises that query i of every row sees no key
    from ``reach + i`` on, so those scores are not computed. ``scale`` is 1 / sqrt(D) unless it is given, ``cap`` is a
    soft cap of the scores, and ``sinks`` (H,) is one more score per head, which takes part in the softmax and has no
    value. Returns (B, Q, H, D).
    """
    rows, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, _, num_keys, _ = key.shape
    group = num_heads // num_kv_heads
    hidden = torch.zeros((), dtype=torch.bool, device=query.device) if mask is None else ~mask
    # (K, B, G, Q, D): the queries of all heads of a group are multiplied with their keys at once.
    scaled = query * (head_dim**-0.5 if scale is None else scale)
    scaled = scaled.view(rows, num_queries, num_kv_heads, group, head_dim).permute(2, 0, 3, 1, 4)
    sinks = None if sinks is None else upcast(sinks).view(num_kv_heads, 1, group, 1)
    if num_queries == 1:
        scores = _capped(upcast(torch.matmul(scaled.squeeze(3), key.transpose(2, 3))), cap)
        weights = _softmax(scores.masked_fill_(hidden, -math.inf), sinks)
        return torch.matmul(weights.to(value.dtype), value).transpose(0, 1).reshape(query.shape)
    hidden = hidden.expand(rows, num_queries, num_keys).unsqueeze(1)
    out = torch.empty_like(scaled, memory_format=torch.contiguous_format)
    step = max(MIN_QUERIES, MAX_SCORES // (rows * group * num_keys))
    for head, begin in itertools.product(range(num_kv_heads), range(0, num_queries, step)):
        queries = slice(begin, min(begin + step, num_queries))
        seen = slice(num_keys if reach is None else min(num_keys, reach + queries.stop - 1))
        part = scaled[head, :, :, queries].reshape(rows, -1, head_dim)
        # Keys times queries, since a product packs its right operand: with few queries, packing the keys would be most
        # of the work.
        scores = upcast(torch.matmul(key[head, :, seen], part.transpose(1, 2))).transpose(1, 2).contiguous()
        scores = _capped(scores, cap).view(rows, group, -1, scores.shape[-1])
        scores.masked_fill_(hidden[:, :, queries, seen], -math.inf)
        weights = _softmax(scores, None if sinks is None else sinks[head, :, :, None]).to(value.dtype)
        mixed = torch.matmul(weights.flatten(1, 2), value[head, :, seen])
        out[head, :, :, queries] = mixed.view(rows, group, -1, head_dim)
    return out.permute(1, 3, 0, 2, 4).reshape(query.shape)


def _capped(scores: Tensor, cap: float | None) -> Tensor:
    return scores if cap is None else soft_cap(scores, cap)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the last dimension. A score in ``sinks`` (..., 1) takes its share and is dropped from the
    result."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.expand(*scores.shape[:-1], 1).to(scores.dtype)), dim=-1).softmax(-1)[..., :-1]


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: list[list[int]],
    query_spans: list[tuple[int, int]],
    starts: list[int],
    window: int | None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """Ragged causal attention over paged KV, one row at a time: the reference for all batched forms.

    Row r's queries are ``query[begin:end]`` with (begin, end) = ``query_spans[r]``, at positions ``starts[r]`` onward;
    its keys are in the pages ``tables[r]``. ``visible`` defines which keys a query sees. ``query`` is (T, H, D),
    pages are (K, pages, S, D); returns (T, H, D). For the other arguments see ``attention``.
    """
    out = torch.empty_like(query)
    for table, (begin, end), start in zip(tables, query_spans, starts, strict=True):
        length = start + end - begin
        ids = torch.tensor([table], device=query.device)
        keys = gather_kv(key_pages, ids)[:, :, :length]
        values = gather_kv(value_pages, ids)[:, :, :length]
        at = torch.arange(start, length, device=query.device).unsqueeze(1)
        seen = torch.arange(length, device=query.device).unsqueeze(0)
        mask = visible(at, seen, window, chunked).unsqueeze(0)
        rows = query[begin:end].unsqueeze(0)
        out[begin:end] = attention(rows, keys, values, mask, scale=scale, cap=cap, sinks=sinks)[0]
    return out


def visible(query_positions: Tensor, key_positions: Tensor, window: int | None, chunked: bool = False) -> Tensor:
    """The mask of the keys that each query sees: ``key <= query``, and ``key > query - window`` if there is a window.
    ``chunked``: the window is the size of chunks, and a query sees only its own chunk, ``key >= query // window *
    window``. Broadcasts."""
    mask = key_positions <= query_positions
    if window is None:
        return mask
    lowest = query_positions // window * window if chunked else query_positions - window + 1
    return mask & (key_positions >= lowest)
