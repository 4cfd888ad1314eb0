"""Products of float32 and bfloat16 weights against float64, on every instruction set; the bits that must not change."""

import ctypes
import itertools
import math

import numpy as np
import pytest

from penstock.kernels.cpu.bindings import LANES, GemmActivation, GemmOutput, Inputs, Matrix, OutputMode, StorageFormat

GUARD = 64
POISON = 0xFF
"""Of float32 and bfloat16 alike, a NaN."""
FORMATS = (StorageFormat.F32, StorageFormat.BF16)
ALPHA, LIMIT = 1.702, 3.0
"""Of the clamped activation: well within what the sums of these tests reach."""
ROWS = (1, 2, 3, 7, 8, 12, 13, 16, 17, 24, 25, 33, 64, 65)


class Guarded:
    """Bytes full of NaN, aligned to 64, of which what lies round them must not change."""

    def __init__(self, num_bytes):
        self._all = np.full(num_bytes + 3 * GUARD, POISON, dtype=np.uint8)
        start = GUARD + -(self._all.ctypes.data + GUARD) % 64
        self._inside = slice(start, start + num_bytes)
        self.bytes = self._all[self._inside]
        self.address = self.bytes.ctypes.data

    def check(self):
        assert (self._all[: self._inside.start] == POISON).all()
        assert (self._all[self._inside.stop :] == POISON).all()


def to_bf16(values):
    """Rounds float32 to bfloat16, ties to even; returns its 16 bits."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def rounded(values, matrix_format):
    """What a product multiplies, in float64."""
    if matrix_format == StorageFormat.F32:
        return values.astype(np.float64)
    return (to_bf16(values).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def addresses(rows, pointer):
    """The 16 rows of a panel, missing ones null."""
    some = [row.ctypes.data_as(ctypes.POINTER(pointer)) for row in rows]
    return (ctypes.POINTER(pointer) * LANES)(*some, *[None] * (LANES - len(some)))


class Packed:
    """A matrix in panels, (rows, columns) float32 before."""

    def __init__(self, table, matrix_format, weights, bias=None):
        rows, columns = weights.shape
        self.table, self.format, self.columns, self.rows = table, matrix_format, columns, rows
        self.num_panels = math.ceil(rows / LANES)
        self.panel_bytes = table.panel_bytes(matrix_format, columns, 0)
        self.memory = Guarded(self.num_panels * self.panel_bytes)
        for panel in range(self.num_panels):
            some = addresses(weights[panel * LANES : (panel + 1) * LANES], ctypes.c_float)
            at = self.memory.address + panel * self.panel_bytes
            table.pack_panel(matrix_format, columns, 0, some, at, (ctypes.c_double * 2)())
        self.memory.check()
        self.bias = np.zeros(self.num_panels * LANES, np.float32)
        if bias is not None:
            self.bias[:rows] = bias
        data = self.bias.ctypes.data if bias is not None else None
        self.matrix = Matrix(matrix_format, rows, columns, 0, self.panel_bytes, self.memory.address, data, None)

    def prepare(self, x):
        """Inputs in memory full of NaN before, from rows with NaN behind them."""
        stride = self.table.input_bytes(self.format, self.columns, 0)
        assert stride % 64 == 0
        memory = Guarded(len(x) * stride)
        source = Guarded(self.columns * 4)
        for m, row in enumerate(x):
            source.bytes.view(np.float32)[:] = row
            self.table.prepare(self.format, self.columns, 0, source.address, memory.address + m * stride)
        memory.check()
        return memory, stride

    def multiply(self, x, *, mode=OutputMode.STORE, gate=GemmActivation.SILU, cuts=(), base=None):
        """The whole product of x, (M, columns) float32, in calls that end at the panels `cuts`. Nothing is written
        beyond its columns. With `base` it is added to that."""
        memory, stride = self.prepare(x)
        width = self.rows // 2 if mode == OutputMode.GATED else self.rows
        out = Guarded(len(x) * (width + 5) * 4)
        values = out.bytes.view(np.float32).reshape(len(x), width + 5)
        if base is not None:
            values[:, :width] = base
        inputs = Inputs(memory.address, stride, len(x))
        output = GemmOutput(out.address, width + 5, mode, gate, ALPHA, LIMIT)
        for begin, end in itertools.pairwise([0, *cuts, self.num_panels]):
            self.table.product(self.matrix, inputs, begin, end, output)
        out.check()
        assert (values[:, width:].view(np.uint32) == 0xFFFFFFFF).all()
        return values[:, :width].copy()


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def bound(x, weights, matrix_format):
    """What a sum of so many roundings may be off by, of each output."""
    columns = weights.shape[1]
    return (columns + 2) * 2.0**-24 * (np.abs(rounded(x, matrix_format)) @ np.abs(rounded(weights, matrix_format)).T)


def exact(x, weights, matrix_format):
    return rounded(x, matrix_format) @ rounded(weights, matrix_format).T


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("columns", [1, 2, 33, 40, 77, 576])
@pytest.mark.parametrize("rows", [1, 17, 151])
def test_products_are_right_for_every_number_of_inputs(table, matrix_format, rows, columns):
    weights, x = random(rows, columns), random(max(ROWS), columns, seed=1)
    packed = Packed(table, matrix_format, weights)
    expected, allowed = exact(x, weights, matrix_format), bound(x, weights, matrix_format)
    for m in ROWS:
        error = np.abs(packed.multiply(x[:m]) - expected[:m])
        assert (error <= allowed[:m]).all(), (m, error.max())


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_bits_depend_only_on_the_row_and_the_column(table, matrix_format):
    weights, x = random(113, 3101), random(65, 3101, seed=1)
    packed = Packed(table, matrix_format, weights)
    whole = packed.multiply(x)
    assert (np.abs(whole - exact(x, weights, matrix_format)) <= bound(x, weights, matrix_format)).all()
    for m, begin in zip(ROWS, itertools.cycle((0, 1, 40)), strict=False):
        begin = min(begin, 65 - m)
        cuts = ((), (1,), (2, 3), (1, 2, 3, 4, 5, 6, 7), (5,))[m % 5]
        np.testing.assert_array_equal(packed.multiply(x[begin : begin + m], cuts=cuts), whole[begin : begin + m])


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("columns", [1, 70, 576])
def test_every_number_of_rows_gives_the_bits_of_one(table, matrix_format, columns):
    weights, x = random(35, columns), random(65, columns, seed=1)
    packed = Packed(table, matrix_format, weights)
    alone = np.concatenate([packed.multiply(row[None]) for row in x])
    for m in range(1, len(x) + 1):
        np.testing.assert_array_equal(packed.multiply(x[-m:]), alone[-m:])


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("m", [131, 240, 300])
def test_more_rows_and_panels_than_a_block(table, matrix_format, m):
    weights, x = random(16 * 18 + 3, 1700), random(m, 1700, seed=1)
    packed = Packed(table, matrix_format, weights)
    whole = packed.multiply(x)
    assert (np.abs(whole - exact(x, weights, matrix_format)) <= bound(x, weights, matrix_format)).all()
    np.testing.assert_array_equal(packed.multiply(x[100:114]), whole[100:114])


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row_and_its_column(table, matrix_format, value):
    weights, x = random(37, 70), random(33, 70, seed=1)
    expected = Packed(table, matrix_format, weights).multiply(x)
    weights[18, 69], x[10, 69] = value, value
    result = Packed(table, matrix_format, weights).multiply(x)
    assert not np.isfinite(result[10]).any()
    assert not np.isfinite(result[:, 18]).any()
    others = np.ix_(np.arange(33) != 10, np.arange(37) != 18)
    np.testing.assert_array_equal(result[others], expected[others])


@pytest.mark.parametrize("matrix_format", FORMATS)
def test_bias_and_addition(table, matrix_format):
    weights, x, bias = random(37, 90), random(33, 90, seed=1), random(37, seed=2)
    packed = Packed(table, matrix_format, weights, bias)
    plain = Packed(table, matrix_format, weights).multiply(x)
    np.testing.assert_array_equal(packed.multiply(x), plain + bias)
    base = random(33, 37, seed=3)
    np.testing.assert_array_equal(packed.multiply(x, mode=OutputMode.ADD, base=base), base + (plain + bias))
    np.testing.assert_array_equal(packed.multiply(x[3:4], mode=OutputMode.ADD, base=base[3:4], cuts=(1,)),
                                  base[3:4] + (plain + bias)[3:4])  # fmt: skip


GATES = [kind for kind in GemmActivation if kind not in (GemmActivation.RELU, GemmActivation.RELU_SQUARED)]
"""The activations of MLPs with a gate."""


def gated(x, up, gate):
    if gate == GemmActivation.SILU:
        return x / (1 + np.exp(-x)) * up
    if gate == GemmActivation.GELU:
        return x / 2 * np.vectorize(math.erfc)(-x / math.sqrt(2)) * up
    if gate == GemmActivation.GELU_TANH:
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) * up
    x = np.minimum(x, LIMIT)
    return x / (1 + np.exp(-ALPHA * x)) * (np.clip(up, -LIMIT, LIMIT) + 1)


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("width", [16, 35])
def test_gated_products(table, matrix_format, gate, width):
    """Panels of gate and of up by turns; the last two are filled alike."""
    gates, ups, x = random(width, 61), random(width, 61, seed=1), random(15, 61, seed=2)
    bias = random(2, width, seed=3)
    panels = [part for i in range(0, width, LANES) for part in (gates[i : i + LANES], ups[i : i + LANES])]
    biases = [part for i in range(0, width, LANES) for part in (bias[0, i : i + LANES], bias[1, i : i + LANES])]
    # Rows that fill up panels are packed as zeros, so all but the last panel are whole ones here.
    filled = [np.concatenate([part, np.zeros((LANES - len(part), 61), np.float32)]) for part in panels]
    filled_biases = [np.concatenate([part, np.zeros(LANES - len(part), np.float32)]) for part in biases]
    packed = Packed(table, matrix_format, np.concatenate(filled), np.concatenate(filled_biases))
    packed.rows = packed.matrix.rows = 2 * width
    result = packed.multiply(x, mode=OutputMode.GATED, gate=gate)
    left, right = exact(x, gates, matrix_format) + bias[0], exact(x, ups, matrix_format) + bias[1]
    np.testing.assert_allclose(result, gated(left, right, gate), rtol=2e-5, atol=2e-5)
    for m, cuts in ((1, ()), (4, (2,) if width > LANES else ()), (13, ())):
        again = packed.multiply(x[:m], mode=OutputMode.GATED, gate=gate, cuts=cuts)
        np.testing.assert_array_equal(again, result[:m])


@pytest.mark.parametrize("matrix_format", FORMATS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("row", [3, 16 + 3])
def test_a_gate_or_what_it_lets_through_that_is_not_a_number_shows(table, matrix_format, gate, row):
    weights = random(32, 40)
    weights[row, 11] = np.nan
    result = Packed(table, matrix_format, weights).multiply(random(9, 40), mode=OutputMode.GATED, gate=gate)
    assert np.isnan(result[:, 3]).all()
    assert np.isfinite(np.delete(result, 3, axis=1)).all()


@pytest.mark.parametrize("columns", [1, 15, 600])
def test_rows_come_back_as_they_were_packed(table, columns):
    weights = random(19, columns) * 10
    for matrix_format in FORMATS:
        packed = Packed(table, matrix_format, weights)
        for row in (0, 7, 16, 18):
            out = Guarded(columns * 4)
            table.unpack_row(packed.matrix, row, out.address)
            out.check()
            np.testing.assert_array_equal(out.bytes.view(np.float32), rounded(weights[row], matrix_format))
        used = packed.memory.bytes.view(np.uint32).reshape(2, -1, LANES)
        assert (used[1, :, 3:] == 0).all()  # rows that there are none of


@pytest.mark.parametrize("columns", [1, 2, 15, 600])
def test_bits_of_bfloat16_are_kept(table, columns):
    bits = np.random.default_rng(columns).integers(0, 1 << 16, (18, columns), dtype=np.uint16)
    panel_bytes = table.panel_bytes(StorageFormat.BF16, columns, 0)
    for begin, rows in ((0, 16), (16, 2)):
        panel = Guarded(panel_bytes)
        table.pack_panel_bf16(columns, addresses(bits[begin : begin + rows], ctypes.c_uint16), panel.address)
        panel.check()
        filled = np.zeros((LANES, panel_bytes // (2 * LANES)), np.uint16)  # up to a pair, or to a tile
        filled[:rows, :columns] = bits[begin : begin + rows]
        expected = filled.reshape(LANES, -1, 2).transpose(1, 0, 2)
        np.testing.assert_array_equal(panel.bytes.view(np.uint16), expected.ravel())


def test_rounding_is_to_the_nearest_even(table):
    """Inputs and weights alike: of ties, of what rounds up to the next power of two, and of negative numbers."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3FFFFFFF, 0xBF818000, 0xBF808001], np.uint32)
    values = bits.view(np.float32)
    identity = np.eye(len(values), dtype=np.float32)
    expected = rounded(values, StorageFormat.BF16)
    np.testing.assert_array_equal(Packed(table, StorageFormat.BF16, identity).multiply(values[None])[0], expected)
    one = np.ones((1, 1), np.float32)
    np.testing.assert_array_equal(Packed(table, StorageFormat.BF16, values[:, None]).multiply(one)[0], expected)
