"""Products of int8, int4, FP4 and Q4_0 weights against float64, on every instruction set: what is packed, what it is
multiplied with, and the bits that must not change."""

import ctypes
import itertools
import math
import mmap

import numpy as np
import pytest

from penstock.kernels.cpu.bindings import (
    LANES,
    GemmActivation,
    GemmOutput,
    Inputs,
    Matrix,
    OutputMode,
    StorageFormat,
    find_kernels,
)

GUARD = 64
POISON = 0xFF
"""In every byte, a NaN of float32."""
KINDS = ((StorageFormat.INT8, 0), (StorageFormat.INT4, 32), (StorageFormat.INT4, 128))
FP4 = (StorageFormat.FP4, 32)
Q4_0 = (StorageFormat.Q4_0, 32)
ALL_KINDS = (*KINDS, FP4, Q4_0)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
ROWS = (1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65)


class Guarded:
    """Poisoned bytes, aligned to 64, of which what lies round them must not change."""

    def __init__(self, num_bytes):
        self._all = np.full(num_bytes + 3 * GUARD, POISON, dtype=np.uint8)
        start = GUARD + -(self._all.ctypes.data + GUARD) % 64
        self._inside = slice(start, start + num_bytes)
        self.bytes = self._all[self._inside]
        self.address = self.bytes.ctypes.data

    def check(self):
        assert (self._all[: self._inside.start] == POISON).all()
        assert (self._all[self._inside.stop :] == POISON).all()


class Fenced:
    """Poisoned bytes, aligned to 64, of which what lies before them must not change, and what lies behind cannot be
    read: no sanitizer sees the loads of tile registers."""

    def __init__(self, num_bytes):
        assert num_bytes % 64 == 0
        size = -(-(num_bytes + GUARD) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._all = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
        self._all[:size] = POISON
        end = ctypes.c_void_p(self._all.ctypes.data + size)
        assert ctypes.CDLL(None).mprotect(end, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        self._before = self._all[: size - num_bytes]
        self.bytes = self._all[size - num_bytes : size]
        self.address = self.bytes.ctypes.data

    def check(self):
        assert (self._before == POISON).all()


class Packed:
    """A matrix of so many rows and columns; `pack` is called with each panel's number and address."""

    def __init__(self, table, kind, rows, columns, pack, bias=None):
        self.table, self.kind, self.rows, self.columns = table, kind, rows, columns
        self.num_panels = math.ceil(rows / LANES)
        panel_bytes = table.panel_bytes(kind[0], columns, kind[1])
        assert panel_bytes % 64 == 0
        self.memory = Fenced(self.num_panels * panel_bytes)
        for panel in range(self.num_panels):
            pack(panel, self.memory.address + panel * panel_bytes)
        self.memory.check()
        self.bias = np.zeros(self.num_panels * LANES, np.float32)
        if bias is not None:
            self.bias[:rows] = bias
        data = self.bias.ctypes.data if bias is not None else None
        self.matrix = Matrix(kind[0], rows, columns, kind[1], panel_bytes, self.memory.address, data, None)

    def unpacked(self):
        rows = np.full((self.rows, self.columns), np.nan, np.float32)
        for row in range(self.rows):
            self.table.unpack_row(self.matrix, row, rows[row].ctypes.data)
        return rows

    def multiply(self, x, *, mode=OutputMode.STORE, gate=GemmActivation.SILU, cuts=(), base=None):
        """The product of x, (M, columns), in calls that end at the panels `cuts`; with `base` it is added to that."""
        stride = self.table.input_bytes(self.kind[0], self.columns, self.kind[1])
        assert stride % 64 == 0
        memory = Fenced(len(x) * stride)
        for m, row in enumerate(np.ascontiguousarray(x)):
            self.table.prepare(self.kind[0], self.columns, self.kind[1], row.ctypes.data, memory.address + m * stride)
        memory.check()
        width = self.rows // 2 if mode == OutputMode.GATED else self.rows
        out = Guarded(len(x) * (width + 5) * 4)
        values = out.bytes.view(np.float32).reshape(len(x), width + 5)
        if base is not None:
            values[:, :width] = base
        output = GemmOutput(out.address, width + 5, mode, gate)
        for begin, end in itertools.pairwise([0, *cuts, self.num_panels]):
            self.table.product(self.matrix, Inputs(memory.address, stride, len(x)), begin, end, output)
        out.check()
        assert (values[:, width:].view(np.uint32) == 0xFFFFFFFF).all()
        return values[:, :width].copy()


def pointers(rows):
    """The 16 rows of a panel, missing ones null."""
    pointer = ctypes.POINTER(ctypes.c_float)
    some = [ctypes.cast(row.ctypes.data, pointer) for row in rows]
    return (pointer * LANES)(*some, *[pointer()] * (LANES - len(some)))


def quantized(table, kind, weights, bias=None):
    """The packed matrix, and the sums of squares of its errors and of its weights. FP4 and Q4_0 are quantised
    here."""
    if kind in (FP4, Q4_0):
        codes, scales, zeros = nearest_fp4(weights) if kind == FP4 else nearest_q4_0(weights)
        return from_codes(table, kind, codes, scales, zeros, bias), None
    error = (ctypes.c_double * 2)()

    def pack(panel, address):
        some = pointers(weights[panel * LANES : (panel + 1) * LANES])
        table.pack_panel(kind[0], columns, kind[1], some, address, error)

    rows, columns = weights.shape
    packed = Packed(table, kind, rows, columns, pack, bias)
    return packed, list(error)


def nearest_fp4(weights):
    """Codes, scales and zero points, of which there are none."""
    padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % 32))).reshape(len(weights), -1, 32)
    scales = 2.0 ** np.floor(np.log2(np.abs(padded).max(2) + 1e-30) - 2).astype(np.float32)
    codes = np.abs(padded[..., None] / scales[..., None, None] - E2M1).argmin(3).astype(np.uint8)
    return np.ascontiguousarray(codes.reshape(len(weights), -1)[:, : weights.shape[1]]), scales, np.zeros_like(scales)


def nearest_q4_0(weights):
    """The same, with zero points that are always 8."""
    padded = np.pad(weights, ((0, 0), (0, -weights.shape[1] % 32))).reshape(len(weights), -1, 32)
    scales = (np.abs(padded).max(2) / 7).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(padded / np.where(scales > 0, scales, 1)[..., None]) + 8, 0, 15).astype(np.uint8)
    zeros = np.full_like(scales, 8)
    return np.ascontiguousarray(codes.reshape(len(weights), -1)[:, : weights.shape[1]]), scales, zeros


def from_codes(table, kind, codes, scales, zeros, bias=None):
    def pack(panel, address):
        part = slice(panel * LANES, (panel + 1) * LANES)
        some = (ctypes.c_void_p * LANES)(*[row.ctypes.data for row in codes[part]])
        table.pack_panel_codes(
            kind[0], codes.shape[1], kind[1], some, pointers(scales[part]), pointers(zeros[part]), address
        )

    rows, columns = codes.shape
    return Packed(table, kind, rows, columns, pack, bias)


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def rounded_inputs(x, kind):
    """What the product multiplies: 127 steps to the greatest of each `chunk` columns, in float64."""
    chunk = kind[1] or 128
    parts = []
    for begin in range(0, x.shape[1], chunk):
        part = x[:, begin : begin + chunk]
        most = np.abs(part).max(axis=1, keepdims=True)
        inverse = np.where(most > 0, np.float32(127) / np.where(most > 0, most, 1), 0).astype(np.float32)
        parts.append(np.rint(part * inverse).astype(np.float64) * (most / np.float32(127)).astype(np.float64))
    return np.concatenate(parts, axis=1)


def check(result, x, packed):
    """Against the exact product of what was packed and of the rounded inputs."""
    weights, inputs = packed.unpacked().astype(np.float64), rounded_inputs(x, packed.kind)
    # Codes are taken from 0 or from -128 on, and shifted after the sum: their magnitude bounds the rounding.
    largest = np.abs(weights).max(initial=0)
    allowed = 2.0**-21 * (2 * largest * np.abs(inputs).sum(axis=1, keepdims=True) + 1e-30)
    error = np.abs(result - inputs @ weights.T)
    assert (error <= allowed).all(), (error / allowed).max()


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("columns", [1, 31, 64, 136, 353, 576])
@pytest.mark.parametrize("rows", [1, 53])
def test_products_are_those_of_the_rounded_numbers(table, kind, rows, columns):
    packed, _ = quantized(table, kind, random(rows, columns))
    x = random(max(ROWS), columns, seed=1)
    x[0] = 0
    x[1:, : columns // 2] *= 1000  # columns that are far greater than others
    whole = packed.multiply(x)
    check(whole, x, packed)
    assert (whole[0] == 0).all()


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 17, 299])
def test_what_is_no_number_does_not_become_one(table, kind, wrong, column):
    packed, _ = quantized(table, kind, random(53, 300))
    for rows in (4, 20):
        x = random(rows, 300, seed=1)
        expected = packed.multiply(x)
        x[2, column] = wrong
        expected[2] = math.nan
        np.testing.assert_array_equal(packed.multiply(x), expected)


@pytest.mark.parametrize("kind", [*ALL_KINDS, (StorageFormat.INT4, 96), (StorageFormat.INT4, 256)])
def test_bits_depend_only_on_the_row_and_the_column(table, kind):
    packed, _ = quantized(table, kind, random(113, 1003))
    x = random(65, 1003, seed=1)
    whole = packed.multiply(x)
    for m, begin in zip(ROWS, itertools.cycle((0, 1, 40)), strict=False):
        begin = min(begin, 65 - m)
        cuts = ((), (1,), (2, 3), (1, 2, 3, 4, 5, 6, 7), (5,))[m % 5]
        np.testing.assert_array_equal(packed.multiply(x[begin : begin + m], cuts=cuts), whole[begin : begin + m])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_any_number_of_rows_has_the_bits_of_one(table, kind):
    packed, _ = quantized(table, kind, random(37, 203))
    x = random(65, 203, seed=1)
    single = np.concatenate([packed.multiply(row[None]) for row in x])
    for m in range(2, 66):
        np.testing.assert_array_equal(packed.multiply(x[:m]), single[:m])
    base = random(65, 37, seed=3)
    added = np.concatenate([packed.multiply(x[m : m + 1], mode=OutputMode.ADD, base=base[m]) for m in range(65)])
    for m in (15, 17, 19, 31, 33, 61, 63):  # of which no rows may be added twice
        np.testing.assert_array_equal(packed.multiply(x[:m], mode=OutputMode.ADD, base=base[:m]), added[:m])


@pytest.mark.parametrize("kind", [*ALL_KINDS, (StorageFormat.INT4, 96), (StorageFormat.INT4, 256)])
@pytest.mark.parametrize("columns", [5, 77, 128, 160, 323, 1216])
def test_tile_registers_give_the_bits_of_vectors(cpu_library, kind, columns):
    tables = [find_kernels(name, cpu_library) for name in ("amx", "avx512_bf16")]
    if None in tables:
        pytest.skip("this machine has no amx")
    weights, x = random(53, columns), random(40, columns, seed=1)
    x[::3, : columns // 2] *= 1000
    for m in (1, 4, 15, 16, 40):
        results = [quantized(table, kind, weights)[0].multiply(x[:m]) for table in tables]
        np.testing.assert_array_equal(*[result.view(np.uint32) for result in results])


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_outputs_are_stored_added_and_gated(table, kind):
    weights, bias, x, base = random(96, 100), random(96, seed=2), random(19, 100, seed=1), random(19, 96, seed=3)
    plain = quantized(table, kind, weights)[0].multiply(x)
    packed, _ = quantized(table, kind, weights, bias)
    stored = packed.multiply(x)
    np.testing.assert_allclose(stored, plain + bias, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(packed.multiply(x, mode=OutputMode.ADD, base=base), base + stored, rtol=1e-6, atol=1e-6)
    gate, up = stored.reshape(19, 3, 2, 16).astype(np.float64).transpose(2, 0, 1, 3).reshape(2, 19, 48)
    gated = packed.multiply(x, mode=OutputMode.GATED, cuts=(2,))
    np.testing.assert_allclose(gated, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 3e4])
def test_the_packing_error_is_small_and_reported(table, kind, size):
    weights = random(37, 330) * np.float32(size) + np.float32(0.3 * size)
    weights[5] = 0
    packed, error = quantized(table, kind, weights)
    off = packed.unpacked().astype(np.float64) - weights
    np.testing.assert_allclose(error, [(off**2).sum(), (weights.astype(np.float64) ** 2).sum()], rtol=1e-4)
    assert (off[5] == 0).all()
    if kind[0] == StorageFormat.INT8:
        assert (np.abs(off) <= np.abs(weights).max(axis=1, keepdims=True) / 254 * 1.00001).all()
    else:
        assert (off**2).sum() < 0.9 * (rounded_to_nearest(weights, kind[1]) ** 2).sum()


def rounded_to_nearest(weights, group):
    """The errors of 16 steps from the least to the greatest of each group, zero among them."""
    errors = []
    for begin in range(0, weights.shape[1], group):
        part = weights[:, begin : begin + group].astype(np.float64)
        low, high = np.minimum(part.min(1, keepdims=True), 0), np.maximum(part.max(1, keepdims=True), 0)
        step = np.where(high > low, (high - low) / 15, 1)
        zero = np.rint(-low / step)
        errors.append((np.clip(np.rint(part / step) + zero, 0, 15) - zero) * step - part)
    return np.concatenate(errors, axis=1)


def test_weights_of_any_size_share_a_panel(table):
    weights = random(16, 64) * np.logspace(-9, 9, 16, dtype=np.float32)[:, None]
    for kind in KINDS:
        packed, _ = quantized(table, kind, weights)
        off = np.linalg.norm(packed.unpacked().astype(np.float64) - weights, axis=1)
        assert (off < 0.13 * np.linalg.norm(weights.astype(np.float64), axis=1)).all()
    for kind in KINDS:  # too small to be told from zero
        packed, _ = quantized(table, kind, np.full((16, 64), 1e-38, np.float32))
        assert np.abs(packed.unpacked()).max() < 1e-37


@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 0])
def test_int4_codes_are_kept(table, group):
    rows, columns = 21, 328
    groups = math.ceil(columns / group) if group else 1
    numbers = np.random.default_rng(group)
    codes = numbers.integers(0, 16, (rows, columns), dtype=np.uint8)
    scales = (numbers.random((rows, groups)) * 0.02 + 1e-4).astype(np.float16).astype(np.float32)
    zeros = numbers.integers(0, 17, (rows, groups)).astype(np.float32)
    zeros[3] = 7.5
    packed = from_codes(table, (StorageFormat.INT4, group), codes, scales, zeros)
    index = np.arange(columns) // group if group else np.zeros(columns, int)
    np.testing.assert_array_equal(packed.unpacked(), (codes - zeros[:, index]) * scales[:, index])
    chunk = {256: 128, 0: 128}.get(group, group)
    packed.kind = (StorageFormat.INT4, group)
    x = random(9, columns, seed=1)
    result = packed.multiply(x)
    packed.kind = (StorageFormat.INT4, chunk)
    check(result, x, packed)


@pytest.mark.parametrize("columns", [5, 32, 130, 320])
def test_fp4_codes_are_kept(table, columns):
    """All codes, and all scales that are normal numbers."""
    numbers = np.random.default_rng(columns)
    codes = numbers.integers(0, 16, (53, columns), dtype=np.uint8)
    scales = np.float32(2) ** numbers.integers(-126, 100, (53, math.ceil(columns / 32))).astype(np.float32)
    packed = from_codes(table, FP4, codes, scales, np.zeros_like(scales))
    expected = E2M1[codes] * scales[:, np.arange(columns) // 32]
    np.testing.assert_array_equal(packed.unpacked(), expected)


@pytest.mark.parametrize("columns", [5, 32, 130, 320])
def test_q4_0_codes_are_kept(table, columns):
    """All codes, and scales of any size that float16 has."""
    numbers = np.random.default_rng(columns)
    codes = numbers.integers(0, 16, (53, columns), dtype=np.uint8)
    scales = (2.0 ** numbers.uniform(-24, 15, (53, math.ceil(columns / 32)))).astype(np.float16).astype(np.float32)
    scales[::3] *= -1  # as GGUF's are where a block's largest weight is positive
    packed = from_codes(table, Q4_0, codes, scales, np.full_like(scales, 8))
    expected = (codes.astype(np.float32) - 8) * scales[:, np.arange(columns) // 32]
    np.testing.assert_array_equal(packed.unpacked(), expected)


@pytest.mark.parametrize("columns", [64, 2880])
@pytest.mark.parametrize(("kind", "scale_bytes"), [(FP4, 1), (Q4_0, 2)])
def test_a_panel_takes_hardly_more_than_its_codes_and_scales(table, kind, scale_bytes, columns):
    """An int4 panel with groups of 32 takes 11 % more than one of Q4_0."""
    in_file = 16 * (columns // 2 + columns // 32 * scale_bytes)
    assert table.panel_bytes(*kind[:1], columns, 32) <= 1.06 * in_file


def test_int8_codes_are_kept(table):
    numbers = np.random.default_rng(0)
    codes = numbers.integers(-128, 128, (21, 331), dtype=np.int8)
    scales, zeros = numbers.random((21, 1), dtype=np.float32), numbers.integers(-128, 128, (21, 1)).astype(np.float32)
    zeros[::2] = 0
    packed = from_codes(table, (StorageFormat.INT8, 0), codes, scales, zeros)
    np.testing.assert_array_equal(packed.unpacked(), (codes - zeros) * scales)
    x = random(9, 331, seed=1)
    check(packed.multiply(x), x, packed)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_extremes_of_codes_and_inputs_do_not_overflow(table, kind):
    highest, lowest, zero = {
        StorageFormat.INT8: (0x7F, 0x80, 0),
        StorageFormat.INT4: (15, 0, 16),
        StorageFormat.FP4: (7, 15, 0),
        StorageFormat.Q4_0: (15, 0, 8),
    }[kind[0]]
    codes = np.full((16, 256), highest, np.uint8)
    codes[8:] = lowest
    ones, zeros = np.ones((16, 8), np.float32), np.full((16, 8), zero, np.float32)
    packed = from_codes(table, kind, codes, ones, zeros)
    x = np.full((3, 256), 127, np.float32)
    x[1] = -127
    expected = x.astype(np.float64) @ packed.unpacked().T.astype(np.float64)
    np.testing.assert_array_equal(packed.multiply(x), expected)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_rows_of_inputs_do_not_meet_in_the_cache(table, kind):
    for columns in range(1, 4200, 61):
        assert table.input_bytes(kind[0], columns, kind[1]) % 1024 != 0
