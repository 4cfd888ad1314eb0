"""The torch references against the naive form of each formula, and against transformers."""

import math

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from penstock.kernels.reference import ops as reference
from penstock.kernels.reference.ops import (
    attention,
    choose_experts,
    clamped_gate,
    gated_activation,
    gather_kv,
    paged_attention,
    rms_norm,
    rotate,
    visible,
    write_kv,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_that_of_transformers(dtype):
    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data.normal_()
    x = torch.randn(7, 48, dtype=dtype) * 3
    # theirs computes in fp32 even for fp64
    tolerance = 1e-6 if dtype is torch.float64 else 0.0
    got = rms_norm(x, theirs.weight.data, 1e-5)
    torch.testing.assert_close(got, theirs(x).detach(), atol=tolerance, rtol=tolerance)


def test_rms_norm_of_fp64_keeps_fp64():
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x, torch.ones(8, dtype=torch.float64), 1e-6), expected, atol=1e-15, rtol=1e-14)


@pytest.mark.parametrize("head_dim", [16, 24, 80])
def test_rotate_is_that_of_transformers(head_dim):
    x = torch.randn(5, 3, head_dim)
    angles = torch.randn(5, head_dim // 2) * 100
    doubled = torch.cat((angles, angles), dim=-1)
    expected, _ = apply_rotary_pos_emb(x, x, doubled.cos(), doubled.sin())
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin()), expected, atol=1e-6, rtol=1e-6)


def test_rotate_turns_each_pair_by_its_angle():
    x = torch.randn(1, 1, 4, dtype=torch.float64)
    angles = torch.tensor([[0.3, 1.1]], dtype=torch.float64)
    got = rotate(x, angles.cos(), angles.sin()).flatten()
    for i in range(2):
        pair = complex(x[0, 0, i], x[0, 0, i + 2]) * complex(math.cos(angles[0, i]), math.sin(angles[0, i]))
        assert complex(got[i], got[i + 2]) == pytest.approx(pair)


@pytest.mark.parametrize("half", [1, 4, 11])
def test_rotate_of_a_part_of_a_head_keeps_the_rest(half):
    x, angles = torch.randn(5, 3, 24), torch.randn(5, half)
    got = rotate(x, angles.cos(), angles.sin())
    assert torch.equal(got[..., : 2 * half], rotate(x[..., : 2 * half], angles.cos(), angles.sin()))
    assert torch.equal(got[..., 2 * half :], x[..., 2 * half :])


def test_rms_norm_multiplies_in_the_dtype_of_the_weight():
    x, weight = torch.randn(5, 16).bfloat16(), 1 + torch.randn(16) / 1000
    expected = (x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight).bfloat16()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, atol=0, rtol=0)


def test_clamped_gate_by_hand():
    gate, up = torch.tensor([0.5, 9.0, -9.0, 2.0]), torch.tensor([1.0, 8.0, -8.0, 0.25])
    expected = []
    for g, u in ((0.5, 1.0), (7.0, 7.0), (-9.0, -7.0), (2.0, 0.25)):
        expected.append(g / (1 + math.exp(-1.702 * g)) * (u + 1))
    torch.testing.assert_close(clamped_gate(torch.cat((gate, up)), 1.702, 7.0), torch.tensor(expected))


def test_choose_experts_by_hand():
    logits = torch.tensor([[0.0, math.log(5), math.log(3), math.log(1)]])
    chosen, probabilities = choose_experts(logits, 2, normalise=False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(probabilities, torch.tensor([[0.5, 0.3]]))
    _, probabilities = choose_experts(logits, 2, normalise=True)
    torch.testing.assert_close(probabilities, torch.tensor([[0.625, 0.375]]))


def test_choose_experts_from_the_best_groups_by_hand():
    logits = torch.tensor([[0.0, math.log(5), math.log(3), math.log(3), math.log(4), math.log(1)]])
    chosen, factors = choose_experts(logits, 2, normalise=False, num_groups=3, groups_chosen=1, scale=2.0)
    assert chosen.tolist() == [[1, 0]]
    torch.testing.assert_close(factors, torch.tensor([[10 / 17, 2 / 17]]))
    assert choose_experts(logits, 3, normalise=False, num_groups=3, groups_chosen=2)[0].tolist() == [[1, 4, 0]]


def test_of_equally_likely_experts_the_first_are_chosen():
    logits = torch.tensor([0.5, 1.0, -0.0, 0.0]).repeat_interleave(50).flip(0).unsqueeze(0)  # 0, -0, 1, 0.5
    assert choose_experts(logits, 153, normalise=False)[0].tolist() == [[*range(100, 200), *range(53)]]


@pytest.mark.parametrize(("ours", "theirs"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_gated_activation_is_that_of_transformers(ours, theirs):
    gate, up = torch.randn(6, 10), torch.randn(6, 10)
    torch.testing.assert_close(gated_activation(torch.cat((gate, up), 1), ours), ACT2FN[theirs](gate) * up)


def test_write_kv_puts_each_token_into_its_slot_and_nothing_else():
    pages = torch.randn(2, 4, 16, 8)
    before = pages.clone()
    values = torch.randn(3, 2, 8)
    write_kv(pages, torch.tensor([5, 63, 16]), values)
    assert torch.equal(pages[:, 0, 5], values[0])
    assert torch.equal(pages[:, 3, 15], values[1])
    assert torch.equal(pages[:, 1, 0], values[2])
    assert (pages != before).any(-1).any(0).sum() == 3


def test_gather_kv_reads_pages_in_the_order_of_the_table():
    pages = torch.randn(2, 5, 4, 3)
    got = gather_kv(pages, torch.tensor([[3, 0], [1, 4]]))
    assert got.shape == (2, 2, 8, 3)
    assert torch.equal(got[:, 0], torch.cat((pages[:, 3], pages[:, 0]), 1))
    assert torch.equal(got[:, 1], torch.cat((pages[:, 1], pages[:, 4]), 1))


def naive_attention(query, key, value, window, start, chunked=False):
    """One row, a query and a head at a time, in fp64."""
    num_queries, num_heads, head_dim = query.shape
    group = num_heads // key.shape[1]
    out = torch.zeros_like(query, dtype=torch.float64)
    for i in range(num_queries):
        position = start + i
        first = 0 if window is None else position // window * window if chunked else max(0, position - window + 1)
        for head in range(num_heads):
            keys = key[first : position + 1, head // group].double()
            weights = (keys @ query[i, head].double() / math.sqrt(head_dim)).softmax(0)
            out[i, head] = weights @ value[first : position + 1, head // group].double()
    return out


@pytest.mark.parametrize(("window", "chunked"), [*((window, False) for window in (None, 1, 7, 40)), (7, True)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [16, 24, 80])
def test_paged_attention_is_the_naive_one(window, chunked, num_heads, num_kv_heads, head_dim):
    # A decode, a prompt, a chunk in the middle, a chunk of one page; pages in no order, the last ones partly filled.
    spans = [(30, 1), (0, 21), (13, 9), (16, 16)]
    pages = torch.randperm(12).tolist()
    key_pages, value_pages = torch.full((2, num_kv_heads, 12, 16, head_dim), math.nan)
    queries: list[torch.Tensor] = []
    tables: list[list[int]] = []
    expected: list[torch.Tensor] = []
    query_spans: list[tuple[int, int]] = []
    for start, length in spans:
        total = start + length
        table = [pages.pop() for _ in range(-(-total // 16))]
        key, value = torch.randn(2, total, num_kv_heads, head_dim)
        slots = torch.tensor([table[p // 16] * 16 + p % 16 for p in range(total)])
        write_kv(key_pages, slots, key)
        write_kv(value_pages, slots, value)
        query = torch.randn(length, num_heads, head_dim)
        begin = sum(len(q) for q in queries)
        query_spans.append((begin, begin + length))
        queries.append(query)
        tables.append(table)
        expected.append(naive_attention(query, key, value, window, start, chunked))
    starts = [start for start, _ in spans]
    # What was never written is NaN, so a read of it would show.
    got = paged_attention(
        torch.cat(queries), key_pages, value_pages, tables, query_spans, starts, window, chunked=chunked
    )
    torch.testing.assert_close(got.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 6])
@pytest.mark.parametrize("sunk", [False, True])
def test_scale_cap_and_sinks_by_hand(num_queries, sunk):
    query, key, value = (
        torch.randn(1, num_queries, 4, 8),
        torch.randn(2, 1, 10, 8, dtype=torch.float64),
        torch.randn(2, 1, 10, 8, dtype=torch.float64),
    )
    query, sinks = query.double() * 4, torch.randn(4, dtype=torch.float64) if sunk else None
    mask = visible(torch.arange(10 - num_queries, 10).unsqueeze(1), torch.arange(10), 5).unsqueeze(0)
    got = attention(query, key, value, mask, scale=0.7, cap=2.0, sinks=sinks)
    for i in range(num_queries):
        for head in range(4):
            scores = 2.0 * torch.tanh(key[head // 2, 0] @ query[0, i, head] * 0.7 / 2.0)
            weights = scores.exp() * mask[0, i]
            total = weights.sum() + (0.0 if sinks is None else sinks[head].exp())
            torch.testing.assert_close(got[0, i, head], weights @ value[head // 2, 0] / total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [1, 6])
def test_attention_in_every_dtype(dtype, num_queries):
    query = torch.randn(3, num_queries, 4, 16).to(dtype)
    key, value = torch.randn(2, 2, 3, 20, 16).to(dtype)
    positions = torch.tensor([[19], [11], [9]]) - num_queries + 1 + torch.arange(num_queries)
    mask = visible(positions.unsqueeze(2), torch.arange(20), None)
    got = attention(query, key, value, mask)
    assert got.dtype is dtype
    wide = attention(query.double(), key.double(), value.double(), mask)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(got.double(), wide, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("max_scores", [1, 1 << 19])
@pytest.mark.parametrize("reach", [None, 15])
def test_attention_cut_into_pieces_is_the_same(max_scores, reach, monkeypatch):
    query, key, value = torch.randn(2, 40, 6, 8), torch.randn(3, 2, 64, 8), torch.randn(3, 2, 64, 8)
    mask = visible(torch.arange(14, 54).unsqueeze(1), torch.arange(64), 30).expand(2, 40, 64)
    sinks = torch.randn(6)
    expected = attention(query, key, value, mask, cap=3.0, sinks=sinks)
    if reach is not None:
        # What is promised not to be seen may hold anything.
        key[:, :, 54:] = value[:, :, 54:] = math.nan
    monkeypatch.setattr(reference, "MAX_SCORES", max_scores)
    torch.testing.assert_close(attention(query, key, value, mask, reach, cap=3.0, sinks=sinks), expected)
