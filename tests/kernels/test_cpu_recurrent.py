"""What the CPU library computes for recurrent layers, against the formulas in float64."""

import ctypes

import numpy as np
import pytest

from penstock.kernels.cpu.bindings import StateScan

SIZES = (1, 15, 16, 17, 64, 100)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def at(array):
    return array.ctypes.data


def test_products(table):
    for n in SIZES:
        x, y = numbers(n), numbers(n, seed=1)
        product, gated = x.copy(), x.copy()
        table.multiply(at(product), at(y), n)
        assert (product == x * y).all()
        table.multiply_sigmoid(at(gated), at(y), n)
        np.testing.assert_allclose(gated, x / (1 + np.exp(-y.astype(np.float64))), rtol=1e-6)


@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_convolution(table, taps, is_biased):
    for n in SIZES:
        inputs, weights, bias = numbers(taps + 4, n), numbers(taps, n, seed=1), numbers(n, seed=2)
        out = np.full((5, n), np.nan, dtype=np.float32)
        for token in range(5):
            addresses = (ctypes.c_void_p * taps)(*(at(inputs[token + tap]) for tap in range(taps)))
            table.convolve(addresses, at(weights), at(bias) if is_biased else None, taps, n, at(out[token]))
        want = sum(inputs[tap : tap + 5] * weights[tap].astype(np.float64) for tap in range(taps))
        np.testing.assert_allclose(out, want + bias if is_biased else want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("subtracts", [True, False])
@pytest.mark.parametrize(("key_size", "value_size"), [(8, 16), (16, 24), (128, 128), (5, 80)])
def test_scan(table, key_size, value_size, subtracts):
    width, tokens = -(-value_size // 16) * 16, 6
    query, key = (numbers(tokens, key_size, seed=seed) / key_size**0.5 for seed in (1, 2))
    value = numbers(tokens, value_size, seed=3)
    decay, beta = (1 / (1 + np.exp(-numbers(tokens, seed=seed))) for seed in (4, 5))
    state = np.zeros((key_size, width), dtype=np.float32)
    state[:, :value_size] = numbers(key_size, value_size, seed=6)
    started, out = state.copy(), np.full((tokens, value_size), np.nan, dtype=np.float32)
    row = np.ascontiguousarray(np.concatenate((query, key, value), axis=1))
    decay, beta = decay.astype(np.float32), beta.astype(np.float32)

    def run(state, out, begin, end, columns):
        first = row[begin:]
        scan = StateScan(
            key_size, value_size, subtracts, 0.0 if subtracts else 0.7, at(first), at(first) + 4 * key_size,
            at(first) + 8 * key_size, row.shape[1], at(decay[begin:]), at(beta[begin:]), 1, at(state), width,
            None if out is None else at(out[begin:]), value_size,
        )  # fmt: skip
        for from_column, to_column in columns:
            table.scan_state(scan, end - begin, from_column, to_column)

    run(state, out, 0, tokens, [(0, width)])
    expected = started[:, :value_size].astype(np.float64)
    for token in range(tokens):
        expected *= decay[token]
        error = value[token] - key[token] @ expected if subtracts else value[token]
        expected += np.outer(key[token], beta[token] * error)
        want = query[token] @ expected + (0 if subtracts else 0.7 * value[token])
        np.testing.assert_allclose(out[token], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state[:, :value_size], expected, rtol=1e-5, atol=1e-5)
    assert not state[:, value_size:].any()
    # In pieces of tokens and of columns, the bits are the same.
    again, outputs = started.copy(), np.full_like(out, np.nan)
    columns = [(begin, min(begin + 64, width)) for begin in range(0, width, 64)]
    run(again, outputs, 0, 2, columns)
    run(again, outputs, 2, tokens, columns[::-1])
    assert (again == state).all()
    assert (outputs == out).all()
    run(again, None, 0, tokens, columns)  # only the state
