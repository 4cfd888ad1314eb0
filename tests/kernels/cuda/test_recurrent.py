"""The kernels of recurrent layers against the references in torch, for rows of all kinds in one step."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from penstock.kernels.cuda.recurrent.convolution import ConvolutionShape, convolve
from penstock.kernels.cuda.recurrent.rows import RecurrentRows
from penstock.kernels.reference.recurrent import causal_convolution

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


@pytest.mark.parametrize("taps", [2, 3, 19])
def test_convolution_of_other_sizes(taps, device):
    check_convolution(ROWS, torch.float32, 150, taps, True, True, device)
    check_convolution([(1, 1, 4, {1: 2}), (1, 0, 3, {}), (0, 0, 0, {})], torch.float32, 150, taps, False, False, device)
