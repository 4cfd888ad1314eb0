"""What the CPU library computes entry by entry, against numpy in float64, at every length of a tail."""

import math

import numpy as np
import pytest

from penstock.kernels.cpu.bindings import GemmActivation

SIZES = [*range(1, 66), 576, 1024, 3072]
GUARD = 16
EPS = 1e-6


class Guarded:
    """A row of float32 that stands between guards, at an address that is a multiple of 4 alone."""

    def __init__(self, values):
        self._all = np.full(len(values) + 2 * GUARD, np.float32(-7e7))
        self.address = self._all.ctypes.data + 4 * GUARD
        self._row = self._all[GUARD:-GUARD]
        self._row[:] = values

    @classmethod
    def poisoned(cls, n):
        return cls(np.full(n, np.nan, dtype=np.float32))

    def read(self):
        assert (self._all[:GUARD] == np.float32(-7e7)).all()
        assert (self._all[-GUARD:] == np.float32(-7e7)).all()
        return self._row


def numbers(n, seed=0, spread=1.0):
    return (np.random.default_rng(1000 * n + seed).standard_normal(n) * spread).astype(np.float32)


def close(have, want, rtol):
    """``rtol`` of an entry, or of the smallest normal number."""
    np.testing.assert_allclose(have.astype(np.float64), want, rtol=rtol, atol=1e-37)


def test_rms_norm(table):
    for n in SIZES:
        x, weight = numbers(n, spread=3.0), numbers(n, 1)
        want = x.astype(np.float64) / math.sqrt((x.astype(np.float64) ** 2).mean() + EPS) * weight
        source, weights, out = Guarded(x), Guarded(weight), Guarded.poisoned(n)
        table.rms_norm(source.address, weights.address, n, EPS, out.address)
        close(out.read(), want, 1e-6)
        assert (source.read() == x).all()
        kept = out.read().copy()
        table.rms_norm(source.address, weights.address, n, EPS, source.address)
        assert (source.read() == kept).all()


def test_rms_norm_of_nothing_but_zeros(table):
    row, weights = Guarded(np.zeros(17, dtype=np.float32)), Guarded(numbers(17))
    table.rms_norm(row.address, weights.address, 17, EPS, row.address)
    assert (row.read() == 0).all()


@pytest.mark.parametrize("is_biased", [False, True])
def test_layer_norm(table, is_biased):
    for n in SIZES:
        x, weight, bias = numbers(n, spread=3.0) + np.float32(5), numbers(n, 1), numbers(n, 2)
        centred = x.astype(np.float64) - x.astype(np.float64).mean()
        want = centred / math.sqrt((centred**2).mean() + EPS) * weight + (bias if is_biased else 0)
        source, weights, biases, out = Guarded(x), Guarded(weight), Guarded(bias), Guarded.poisoned(n)
        table.layer_norm(source.address, weights.address, biases.address if is_biased else None, n, EPS, out.address)
        np.testing.assert_allclose(out.read(), want, rtol=1e-5, atol=1e-5 if n > 1 else 1e-3)
        assert (source.read() == x).all()
        kept = out.read().copy()
        table.layer_norm(source.address, weights.address, biases.address if is_biased else None, n, EPS, source.address)
        assert (source.read() == kept).all()


def test_add(table):
    for n in SIZES:
        x, y = numbers(n), numbers(n, 1)
        row, other = Guarded(x), Guarded(y)
        table.add(row.address, other.address, n)
        assert (row.read() == x + y).all()
        assert (other.read() == y).all()


def test_scale(table):
    for n in SIZES:
        x = numbers(n)
        row = Guarded(x)
        table.scale(row.address, 0.37, n)
        assert (row.read() == x * np.float32(0.37)).all()


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("spread", [1e-6, 0.3, 30.0, 1e4])
def test_soft_cap(table, cap, spread):
    for n in SIZES:
        x = numbers(n, spread=spread)
        row = Guarded(x)
        table.soft_cap(row.address, cap, n)
        close(row.read(), cap * np.tanh(x.astype(np.float64) / cap), 1e-6)


def test_soft_cap_at_its_ends(table):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-38, 0.625, -0.625, 0.6250001], dtype=np.float32)
    row = Guarded(x)
    table.soft_cap(row.address, 1.0, len(x))
    close(row.read(), np.tanh(x.astype(np.float64)), 1e-6)


UNCLAMPED = [kind for kind in GemmActivation if kind is not GemmActivation.CLAMPED]


def activated(x, gate):
    if gate is GemmActivation.SILU:
        return x / (1 + np.exp(-x))
    if gate in (GemmActivation.RELU, GemmActivation.RELU_SQUARED):
        return np.maximum(x, 0) ** (2 if gate is GemmActivation.RELU_SQUARED else 1)
    if gate is GemmActivation.GELU:
        return np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x])
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("gate", UNCLAMPED)
def test_gated(table, gate):
    for n in SIZES:
        x, up = numbers(n, spread=2.0), numbers(n, 1)
        want = activated(x.astype(np.float64), gate) * up
        source, other, out = Guarded(x), Guarded(up), Guarded.poisoned(n)
        table.gated(source.address, other.address, n, gate, out.address)
        np.testing.assert_allclose(out.read(), want, rtol=2e-6, atol=1e-6)
        assert (source.read() == x).all()
        assert (other.read() == up).all()
        table.gated(source.address, other.address, n, gate, source.address)
        assert (source.read() == out.read()).all()


@pytest.mark.parametrize("kind", UNCLAMPED)
def test_activate(table, kind):
    for n in SIZES:
        x = numbers(n, spread=2.0)
        row = Guarded(x)
        table.activate(row.address, n, kind)
        np.testing.assert_allclose(row.read(), activated(x.astype(np.float64), kind), rtol=2e-6, atol=1e-6)
    broken = Guarded(np.array([1.0, np.nan, -1.0], dtype=np.float32))
    table.activate(broken.address, 3, kind)
    assert np.flatnonzero(np.isnan(broken.read())).tolist() == [1]


@pytest.mark.parametrize("gate", UNCLAMPED)
def test_a_nan_gate_gives_nan_only_at_its_position(table, gate):
    for at in (0, 7, 18):
        x = numbers(19)
        plain, source, other = Guarded.poisoned(19), Guarded(x), Guarded(numbers(19, 1))
        table.gated(source.address, other.address, 19, gate, plain.address)
        x[at] = np.nan
        out, source = Guarded.poisoned(19), Guarded(x)
        table.gated(source.address, other.address, 19, gate, out.address)
        assert np.flatnonzero(np.isnan(out.read())).tolist() == [at]
        assert np.delete(out.read() == plain.read(), at).all()


def test_rotate(table):
    for half in [*range(1, 40), 64, 128]:
        x, angles = numbers(2 * half), numbers(half, 1, spread=4.0).astype(np.float64)
        cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        # What follows the rotated dimensions of a head stays as it is.
        head, cosine_row, sine_row = Guarded(np.concatenate((x, x))), Guarded(cosines), Guarded(sines)
        table.rotate(head.address, cosine_row.address, sine_row.address, half)
        a, b = x[:half].astype(np.float64), x[half:].astype(np.float64)
        want = np.concatenate((a * cosines - b * sines, b * cosines + a * sines))
        np.testing.assert_allclose(head.read()[: 2 * half], want, rtol=1e-6, atol=1e-6)
        assert (head.read()[2 * half :] == x).all()
