"""The kernels of recurrent layers against the references in torch, for rows of all kinds in one step."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from penstock.kernels.cuda.recurrent.chunk_products import products_size
from penstock.kernels.cuda.recurrent.chunked_scan import scan_chunks
from penstock.kernels.cuda.recurrent.convolution import ConvolutionShape, convolve
from penstock.kernels.cuda.recurrent.gated_norm import GatedNormShape, gated_norm
from penstock.kernels.cuda.recurrent.rows import LEAST_CHUNKED, RecurrentRows, RowChunks, chunk_lengths
from penstock.kernels.cuda.recurrent.scan import ScanShape, scan
from penstock.kernels.reference.ops import rms_norm
from penstock.kernels.reference.recurrent import causal_convolution, gated_delta_rule, state_space_scan

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-4, torch.float16: 2**-8}
# Tokens of each row, how many of them advance its state, its slot, and the slots to which the state is copied after
# some of them. One row has no tokens, as those that pad a graph.
ROWS: tuple[tuple[int, int, int, dict[int, int]], ...] = (
    (1, 1, 3, {}),
    (1, 0, 6, {}),
    (7, 7, 1, {2: 0, 7: 9}),
    (0, 0, 0, {}),
    (5, 1, 5, {1: 2, 4: 8}),
    (40, 37, 4, {16: 10, 32: 7, 38: 11}),
    (1, 1, 12, {1: 13}),
)
NUM_SLOTS = 15
UNIT_EPS = 1e-6


def rows_of(rows, device, padding=3):
    """The rows, and tokens that pad the step."""
    counts = [count for count, *_ in rows]
    starts = [sum(counts[:index]) for index in range(len(rows))]
    saves = [0] * (sum(counts) + padding)
    for start, (_, _, _, copies) in zip(starts, rows, strict=True):
        for number, slot in copies.items():
            saves[start + number - 1] = 1 + slot
    lists = [slot for _, _, slot, _ in rows], starts, counts, [advancing for _, advancing, *_ in rows], saves
    return RecurrentRows(*(torch.tensor(values, dtype=torch.int32, device=device) for values in lists))


def chunks_of(rows, device):
    """The chunks of rows that advance their state by many tokens."""
    firsts, starts, lengths, begin = [0], list[int](), list[int](), 0
    for count, advancing, _, copies in rows:
        if advancing >= LEAST_CHUNKED:
            cut = list(chunk_lengths(count, advancing, copies))
            starts += accumulate(cut[:-1], initial=begin)
            lengths += cut
        firsts.append(len(lengths))
        begin += count
    return RowChunks(*(torch.tensor(values, dtype=torch.int32, device=device) for values in (firsts, starts, lengths)))


def slots_of(*sizes, device, dead=3):
    """A layer's states in all slots, with numbers of other layers between them."""
    stride = sum(torch.Size(size).numel() for size in sizes) + dead
    stride += -stride % 4
    whole = torch.randn(NUM_SLOTS, stride, device=device)
    parts, begin = [], 0
    for size in sizes:
        parts.append(whole[:, begin : begin + torch.Size(size).numel()].unflatten(1, size))
        begin += torch.Size(size).numel()
    return whole, stride, parts


def check_rows(rows, states, advance, tolerance):
    """Expects what ``advance(start, count, state)`` returns for each row, and the states that it leaves, in ``states``:
    before, and after the kernel. Yields each row's tokens and expected results."""
    before, after = states
    expected, start = before.clone(), 0
    for count, advancing, slot, copies in rows:
        state = before[slot].clone()
        results = []
        for number in range(1, count + 1):
            results.append(advance(start + number - 1, state))
            if number <= advancing and number in copies:
                expected[copies[number]] = state
            if number == advancing:
                expected[slot] = state
        if count:
            yield slice(start, start + count), torch.cat(results)
        start += count
    assert_close(after, expected, rtol=tolerance, atol=tolerance)


def convolution_shape(dtype, channels, taps, gated, is_biased, stride):
    shape = ConvolutionShape(dtype, 3 * channels, channels, taps, 2 * channels, 0, channels, is_biased, stride)
    return shape if gated else replace(shape, columns=channels + 5, first=5, factor=None, after=None)


def check_convolution(rows, dtype, channels, taps, gated, is_biased, device):
    step = rows_of(rows, device)
    tokens = len(step.saves)
    whole, stride, [inputs] = slots_of((taps - 1, channels), device=device)
    shape = convolution_shape(dtype, channels, taps, gated, is_biased, stride)
    x = torch.randn(tokens, shape.columns, device=device).to(dtype)
    weight = torch.randn(channels, taps, device=device)
    bias = torch.randn(channels, device=device) if is_biased else None
    value = x[:, shape.first : shape.first + channels].clone()
    value = (value * x[:, :channels] if gated else value).float()
    before, others = inputs.clone(), whole[:, inputs[0].numel() :].clone()
    y = torch.full((tokens, channels), torch.nan, dtype=shape.out_dtype, device=device)
    longest = max(count for count, *_ in rows)
    convolve(shape, x, weight, bias, inputs, step, y, longest)

    def advance(token, state):
        last = state.T.unsqueeze(0).clone()
        result = causal_convolution(value[token].view(1, 1, -1), last, weight, bias)[0]
        state.copy_(last[0].T)
        after = x[token : token + 1, channels : 2 * channels]
        return after * result.to(dtype) if gated else functional.silu(result)

    written = torch.zeros(tokens, dtype=torch.bool)
    # The interpreter rounds to bf16 by cutting off.
    rounding = 2**-6 if gated and dtype == torch.bfloat16 else 1e-6
    for part, expected in check_rows(rows, (before, inputs), advance, rounding):
        assert_close(y[part], expected, rtol=TOLERANCE[shape.out_dtype], atol=TOLERANCE[shape.out_dtype])
        written[part] = True
    assert y[~written].isnan().all(), "tokens without a row are left as they are"
    assert torch.equal(whole[:, inputs[0].numel() :], others)
    # Without results, the states are the same.
    again = torch.zeros_like(whole)[:, : inputs[0].numel()].unflatten(1, inputs.shape[1:]).copy_(before)
    convolve(shape, x, weight, bias, again, step, None, 2)
    assert_close(again, inputs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("gated", "is_biased"), [(True, False), (False, True)])
def test_convolution(gated, is_biased, dtype, device):
    check_convolution(ROWS, dtype, 40, 4, gated, is_biased, device)


@pytest.mark.parametrize("taps", [2, pytest.param(19, marks=pytest.mark.soak)])
def test_convolution_of_other_sizes(taps, device):
    check_convolution(ROWS, torch.float32, 150, taps, True, True, device)
    check_convolution([(1, 1, 4, {1: 2}), (1, 0, 3, {}), (0, 0, 0, {})], torch.float32, 150, taps, False, False, device)


def scan_shape(dtype, heads, key_heads, key_size, value_size, stride, *, is_delta):
    keys, values = key_heads * key_size, heads * value_size
    return ScanShape(
        dtype=dtype, columns=values + 2 * heads + 3, channels=2 * keys + values, query=keys, key=0, value=2 * keys,
        beta=values if is_delta else None, decay=values + heads, heads=heads, key_heads=key_heads, key_size=key_size,
        value_size=value_size, unit_eps=UNIT_EPS if is_delta else None, least_step=0.3,
        most_step=None if is_delta else 1.1, stride=stride,
    )  # fmt: skip


def check_scan(rows, dtype, heads, key_heads, key_size, value_size, device, *, is_delta, in_chunks=False, edit=None):
    step = rows_of(rows, device)
    tokens = len(step.saves)
    whole, stride, [matrices] = slots_of((heads, key_size, value_size), device=device)
    shape = scan_shape(dtype, heads, key_heads, key_size, value_size, stride, is_delta=is_delta)
    mixed, x = torch.randn(tokens, shape.channels, device=device), torch.randn(tokens, shape.columns, device=device)
    x = x.to(dtype)
    decay_bias, rates = torch.randn(heads, device=device), -torch.rand(heads, device=device)
    skips = torch.randn(heads, device=device)
    if edit is not None:
        edit(shape, mixed, x, rates)
    before, others = matrices.clone(), whole[:, matrices[0].numel() :].clone()
    y = torch.full((tokens, heads * value_size), torch.nan, device=device)
    chunks = chunks_of(rows, device) if in_chunks else None
    inputs = shape, mixed, x, decay_bias, rates, None if is_delta else skips
    scan(*inputs, matrices, step, y, chunks)
    if chunks is not None:
        assert chunks.firsts[-1], "some rows have chunks"
        room = torch.full((tokens * products_size(shape),), torch.nan, device=device)
        scan_chunks(*inputs, matrices, step, chunks, room, y)
    key, query, value = (
        part.view(tokens, 1, -1, size)
        for part, size in zip(
            mixed.split([shape.value // 2, shape.value // 2, heads * value_size], dim=1),
            (key_size, key_size, value_size),
            strict=True,
        )
    )
    key, query = (part.repeat_interleave(heads // key_heads, dim=2) for part in (key, query))
    steps = functional.softplus(x[:, shape.decay :][:, :heads].float() + decay_bias)

    def advance(token, state):
        state = state.unsqueeze(0)  # a view
        q, k, v, step = (part[token : token + 1] for part in (query, key, value, steps.unsqueeze(1)))
        if is_delta:
            q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + UNIT_EPS) for part in (q, k))
            beta = torch.sigmoid(x[token : token + 1, shape.beta :][:, :heads].float()).unsqueeze(1)
            result = gated_delta_rule(q * key_size**-0.5, k, v, torch.exp(rates * step), beta, state)
        else:
            step = step.clamp(shape.least_step, shape.most_step)
            result = state_space_scan(v, step, torch.exp(rates * step), k, q, state) + v * skips.unsqueeze(-1)
        return result.flatten(1)

    written = torch.zeros(tokens, dtype=torch.bool)
    tolerance = max(2e-5, 1e-6 * key_size)
    for part, expected in check_rows(rows, (before, matrices), advance, tolerance):
        assert_close(y[part], expected, rtol=tolerance, atol=tolerance)
        written[part] = True
    assert y[~written].isnan().all(), "tokens without a row are left as they are"
    assert torch.equal(whole[:, matrices[0].numel() :], others)
    if chunks is None:  # without results, the states are the same
        again = torch.zeros_like(whole)[:, : matrices[0].numel()].unflatten(1, matrices.shape[1:]).copy_(before)
        scan(*inputs, again, step, None)
        assert_close(again, matrices, rtol=0, atol=0)


SCANNED = (ROWS[1], ROWS[2], ROWS[3], ROWS[4], ROWS[6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_delta_rule(dtype, device):
    check_scan(SCANNED, dtype, 4, 2, 24, 40, device, is_delta=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba2(dtype, device):
    check_scan(SCANNED, dtype, 4, 2, 24, 12, device, is_delta=False)


# A row that ends with a chunk of two tokens, and one with chunks that end where its state is saved, and with tokens
# that do not advance it; beside rows without chunks.
CHUNKED: tuple[tuple[int, int, int, dict[int, int]], ...] = (
    (1, 1, 3, {}),
    (66, 66, 6, {}),
    (0, 0, 0, {}),
    (40, 37, 5, {16: 7, 32: 8, 38: 11}),
    (7, 7, 1, {2: 9}),
)


def test_gated_delta_rule_in_chunks(device):
    check_scan(CHUNKED, torch.bfloat16, 2, 1, 24, 20, device, is_delta=True, in_chunks=True)


def test_mamba2_in_chunks(device):
    """The matrix has more rows than are multiplied at a time."""
    check_scan(CHUNKED, torch.float32, 4, 2, 72, 12, device, is_delta=False, in_chunks=True)


def test_chunks_of_keys_that_are_all_alike(device):
    """A series of powers of their overlaps would have terms of 1e17."""

    def edit(shape, mixed, x, rates):
        mixed[:, shape.key : shape.key + 24] = mixed[0, shape.key : shape.key + 24]
        x[:, shape.beta : shape.beta + 1] = 8.0
        rates.fill_(-1e-3)

    check_scan(CHUNKED[1:2], torch.float32, 1, 1, 24, 16, device, is_delta=True, in_chunks=True, edit=edit)


def test_chunks_whose_decays_are_strong_and_weak(device):
    """The sum of all their logarithms is so large that a difference of two such sums would have lost the weak ones."""

    def edit(shape, mixed, x, rates):
        x[:, shape.decay] = -8.0
        x[::7, shape.decay] = 3000.0
        rates.fill_(-4.0)

    check_scan(CHUNKED[1:2], torch.float32, 1, 1, 24, 16, device, is_delta=True, in_chunks=True, edit=edit)


def test_chunks_end_where_states_are_needed():
    assert list(chunk_lengths(64, 64, ())) == [64]
    assert list(chunk_lengths(200, 200, (0, 48, 176))) == [48, 64, 64, 24]
    assert list(chunk_lengths(40, 37, (-3, 16, 32, 38))) == [16, 16, 5, 3]
    assert list(chunk_lengths(130, 0, ())) == [64, 64, 2]


@pytest.mark.soak
def test_more_columns_than_a_program_has(device):
    check_scan(ROWS, torch.float32, 1, 1, 500, 20, device, is_delta=True)


LARGE = [(1, 1, 3, {}), (1, 1, 4, {1: 5}), (500, 500, 6, {256: 7, 496: 8}), (16, 1, 9, {}), (0, 0, 0, {})]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_layers_at_size(dtype, device):
    """Those of LFM2-1.2B, Qwen3-Next-80B-A3B and Granite-4.0-H-Tiny."""
    check_convolution(LARGE, dtype, 2048, 3, True, False, device)
    check_convolution(LARGE, dtype, 8192, 4, False, True, device)
    for in_chunks in (False, True):
        check_scan(LARGE, dtype, 32, 16, 128, 128, device, is_delta=True, in_chunks=in_chunks)
        check_scan(LARGE, dtype, 48, 1, 128, 64, device, is_delta=False, in_chunks=in_chunks)


def test_rows_that_are_cut_have_the_same_bits(device):
    """In two steps, or in one."""
    count, first = 9, 4
    whole, stride, [matrices] = slots_of((2, 24, 40), device=device)
    shape = scan_shape(torch.float32, 2, 1, 24, 40, stride, is_delta=True)
    mixed, x = torch.randn(count, shape.channels, device=device), torch.randn(count, shape.columns, device=device)
    vectors = torch.randn(2, device=device), -torch.rand(2, device=device)
    found = []
    for cuts in ((0, count), (0, first, count)):
        states = whole.clone()[:, : matrices[0].numel()].unflatten(1, matrices.shape[1:])
        results = []
        for begin, end in pairwise(cuts):
            y = torch.empty(end - begin, 80, device=device)
            step = rows_of([(end - begin, end - begin, 5, {})], device, padding=0)
            scan(shape, mixed[begin:end].clone(), x[begin:end].clone(), *vectors, None, states, step, y)
            results.append(y)
        found.append((torch.cat(results), states))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gates_first", [True, False])
def test_gated_norm(gates_first, dtype, device):
    shape = GatedNormShape(
        dtype=dtype, columns=3 * 20 + 7, first=4, parts=3, width=20, weights=3 if gates_first else 1,
        gates_first=gates_first, eps=1e-5,
    )  # fmt: skip
    x, gates = torch.randn(5, 60, device=device), torch.randn(5, shape.columns, device=device).to(dtype)
    weight, y = torch.randn(shape.weights, 20, device=device), torch.empty(5, 60, dtype=dtype, device=device)
    gated_norm(shape, x, gates, weight, y)
    parts, factors = x.view(5, 3, 20), functional.silu(gates[:, 4:64].float()).view(5, 3, 20)
    expected = rms_norm(parts * factors, weight, 1e-5) if gates_first else rms_norm(parts, weight, 1e-5) * factors
    assert_close(y.float(), expected.flatten(1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    gated_norm(replace(shape, weights=0), x, gates, None, y)
    assert_close(y.float(), (parts * factors).flatten(1), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
