"""The CPU library's attention against numpy in float64, for every instruction set and every format of KV.

Pages begin as bytes of ones, which are NaN as floats, and pages that are nobody's stay so; outputs, scratch memory and
partial results begin as NaN with guards behind them.
"""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from attention_rows import (
    FORMATS,
    GUARD,
    POISON,
    Case,
    Floats,
    Sequence,
    aligned,
    assert_guarded,
    bf16,
    hadamard,
    make_layout,
    unpack,
)

from penstock.kernels.cpu.bindings import (
    LANES,
    QUERY_TILE,
    Kernels,
    StorageFormat,
)

CASES = (
    Case(128, 2, 2, context=1, num_queries=1),
    Case(64, 1, 5, context=17, num_queries=17),
    Case(18, 3, 1, context=33, num_queries=33),
    Case(1024, 1, 2, context=40, num_queries=3),
    Case(80, 2, 3, context=600, num_queries=40),
    Case(16, 1, 7, context=513, num_queries=33, window=300),
    Case(72, 1, 8, context=100, num_queries=40, window=5, soft_cap=30.0),
    Case(96, 1, 4, context=257, num_queries=20, window=1),
    Case(256, 1, 1, context=1025, num_queries=3),
    Case(128, 1, 16, context=300, num_queries=18, sinks=True),
    Case(64, 1, 32, context=272, num_queries=20, window=16, sinks=True),
    Case(128, 1, 2, context=2048, num_queries=1),
    Case(64, 1, 2, context=4097, num_queries=2, window=300, sinks=True),
    Case(128, 1, 6, context=700, num_queries=18, window=5000, soft_cap=20.0, sinks=True),
    Case(64, 1, 4, context=613, num_queries=40, window=300, chunked=True),
    Case(32, 2, 2, context=70, num_queries=70, window=20, chunked=True),
)
"""Every head size, ratio of heads, window; contexts on both sides of pages and splits."""
LATENT_CASES = (
    Case(576, 2, 8, context=300, num_queries=3, is_latent=True),
    Case(40, 4, 3, context=1, num_queries=1, is_latent=True),
    Case(72, 1, 32, context=600, num_queries=40, is_latent=True),
    Case(18, 3, 1, context=1025, num_queries=17, is_latent=True),
)
PAIRS = [*product(FORMATS, CASES), *product((StorageFormat.F32, StorageFormat.BF16), LATENT_CASES)]


# ------------------------------------------------------------------------------------------------------------ the pages


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("head_dim", [2, 18, 64, 80, 128])
def test_a_page_holds_what_was_written(table: Kernels, kv_format: StorageFormat, head_dim: int) -> None:
    rng = np.random.default_rng(1)
    layout = make_layout(kv_format, 3, head_dim)
    page = aligned(layout.page_bytes)
    keys, values = rng.standard_normal((2, LANES, 3, head_dim), np.float32) * 3
    keys[4] = values[4] = 0
    for begin, end in pairwise([0, 1, 2, 5, 6, 13, LANES]):
        rows, slot = (keys[begin].ctypes.data, values[begin].ctypes.data), end - 1
        table.write_kv(layout, page.ctypes.data, begin, end - begin, *rows, keys[0].size)
        got_keys, got_values = unpack(layout, page[:-GUARD])
        assert (got_values[slot + 1 :] == 0).all(), "a slot that is masked weighs nothing only if finite"
        for got, want in ((got_keys, keys), (got_values, values)):
            stored = want if kv_format == StorageFormat.F32 else hadamard(want)
            if kv_format == StorageFormat.F32:
                np.testing.assert_array_equal(got[: slot + 1], stored[: slot + 1])
            elif kv_format == StorageFormat.BF16:
                np.testing.assert_array_equal(got[: slot + 1], bf16(stored[: slot + 1]))
            else:
                step = np.abs(stored).max(-1, keepdims=True) / 127
                assert (np.abs(got - stored) <= step * 0.5001)[: slot + 1].all()
    assert_guarded(page)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("is_latent", [False, True])
def test_the_first_slot_forgets_what_the_page_held(table: Kernels, kv_format: StorageFormat, is_latent: bool) -> None:
    if is_latent and kv_format == StorageFormat.INT8:
        pytest.skip("latents are not stored as INT8")
    case = Case(64, 2, 2, context=40, num_queries=3, is_latent=is_latent)
    fresh, reused = Sequence(table, kv_format, case), Sequence(table, kv_format, case)
    reused.pages[:] = POISON - 1
    for sequence in (fresh, reused):
        sequence.write(0, case.context)
    np.testing.assert_array_equal(reused.attend(reused.tiles()), fresh.attend(fresh.tiles()))


# ---------------------------------------------------------------------------------------------------------- the results

TOLERANCES = {StorageFormat.F32: (2e-6, 2e-6), StorageFormat.BF16: (2.0**-8, 1e-5), StorageFormat.INT8: (1e-3, 1e-4)}
"""Of the weighted mean of magnitudes, and absolute. BF16: numerator and denominator are off by half a unit in the
last of 8 bits, each. INT8: queries have 15 bits, and weights have 16 bits of the largest one."""
WORD_LEVELS = {b"avx512", b"avx2", b"generic"}
"""Levels at which the weights of INT8 have 15 bits."""


@pytest.mark.parametrize(("kv_format", "case"), PAIRS, ids=str)
def test_attention_is_that_of_float64(table: Kernels, kv_format: StorageFormat, case: Case) -> None:
    sequence = Sequence(table, kv_format, case)
    sequence.write(0, case.context)
    got = sequence.attend(sequence.tiles())
    expected, magnitude = sequence.expected(stored=True)
    relative, absolute = TOLERANCES[kv_format]
    if kv_format == StorageFormat.INT8 and table.name in WORD_LEVELS:
        relative *= 2
    excess = np.abs(got - expected) - relative * magnitude - absolute
    assert excess.max() <= 0, f"off by {np.abs(got - expected).max():.3g}"


@pytest.mark.parametrize(("kv_format", "large", "bound"), [
    (StorageFormat.BF16, 0, 0.006), (StorageFormat.INT8, 0, 0.015),
    (StorageFormat.BF16, 20, 0.015), (StorageFormat.INT8, 20, 0.04),
])  # fmt: skip
def test_what_a_format_costs_in_accuracy(table: Kernels, kv_format: StorageFormat, large: int, bound: float) -> None:
    """Also where a dimension is large in all queries and keys, as trained models have some."""
    case = Case(128, 1, 4, context=500, num_queries=8)
    sequence = Sequence(table, kv_format, case)
    sequence.keys[..., 5] += large
    sequence.queries[2:-2, 5 : sequence.width : case.head_dim] += large
    sequence.write(0, case.context)
    error = sequence.attend(sequence.tiles()) - sequence.expected(stored=False)[0]
    assert math.sqrt((error**2).mean()) < bound * sequence.values.std() / math.sqrt(8)


@pytest.mark.parametrize("kv_format", [StorageFormat.F32, StorageFormat.BF16])
@pytest.mark.parametrize("case", CASES[4:7], ids=str)
@pytest.mark.parametrize("spread", [0, 1])
def test_a_query_that_is_not_a_number_has_no_output(
    table: Kernels, kv_format: StorageFormat, case: Case, spread: int
) -> None:
    sequence = Sequence(table, kv_format, case)
    sequence.write(0, case.context)
    expected = sequence.attend(sequence.tiles())
    expected[3, 1] = np.nan
    sequence.queries[sequence.token + 3, case.head_dim + 2] = np.nan
    got = sequence.attend(sequence.tiles(), spread=spread, num_nan=case.head_dim)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kv_format", [StorageFormat.F32, StorageFormat.BF16])
@pytest.mark.parametrize("case", CASES[4:7], ids=str)
def test_a_key_that_is_not_a_number_shows_where_it_is_seen(
    table: Kernels, kv_format: StorageFormat, case: Case
) -> None:
    sequence = Sequence(table, kv_format, case)
    position = case.start + 7
    sequence.write(0, case.context)
    expected = sequence.attend(sequence.tiles())
    sequence.keys[position, 0, 1] = np.nan
    sequence.write(position // LANES * LANES, case.context)
    expected[7 : 7 + (case.window or case.num_queries), : case.group] = np.nan
    got = sequence.attend(sequence.tiles(), num_nan=int(np.isnan(expected).sum()))
    np.testing.assert_array_equal(got, expected)


# ------------------------------------------------------------------------------------------------------------- the bits

SAME_BITS = (
    Case(72, 3, 3, context=550, num_queries=60),
    Case(64, 1, 5, context=600, num_queries=60, window=300, sinks=True),
    Case(32, 1, 8, context=540, num_queries=60, window=16, soft_cap=20.0),
    Case(16, 1, 4, context=640, num_queries=60, window=300, chunked=True),
)
LATENT_SAME_BITS = (Case(72, 3, 3, context=550, num_queries=60, is_latent=True),)


@pytest.mark.parametrize(
    ("kv_format", "case"),
    [*product(FORMATS, SAME_BITS), *product((StorageFormat.F32, StorageFormat.BF16), LATENT_SAME_BITS)],
    ids=str,
)
class TestTheSameBits:
    """A query's output depends on its position and on what is before it alone."""

    @pytest.fixture
    def sequence(self, table: Kernels, kv_format: StorageFormat, case: Case) -> Sequence:
        sequence = Sequence(table, kv_format, case)
        sequence.write(0, case.context)
        return sequence

    @pytest.fixture
    def whole(self, sequence: Sequence) -> Floats:
        return sequence.attend(sequence.tiles())

    def test_in_whatever_tiles(self, sequence: Sequence, whole: Floats) -> None:
        case = sequence.case
        sizes = np.resize([1, 16, 3, 2, 11, 1, 7, 5], case.num_queries)
        cuts = [case.start + int(cut) for cut in np.cumsum(sizes) if cut < case.num_queries]
        np.testing.assert_array_equal(sequence.attend([case.start, *cuts, case.context]), whole)

    def test_a_token_at_a_time(self, sequence: Sequence, whole: Floats) -> None:
        case = sequence.case
        for query in (case.start, case.start + 17, case.context - 1):
            alone = sequence.attend([query, query + 1])
            np.testing.assert_array_equal(alone[0], whole[query - case.start])

    @pytest.mark.parametrize("heads", [2, 3])
    def test_with_several_heads_in_an_item(self, sequence: Sequence, whole: Floats, heads: int) -> None:
        np.testing.assert_array_equal(sequence.attend(sequence.tiles(), heads=heads), whole)

    def test_in_chunks(self, sequence: Sequence, whole: Floats) -> None:
        """Each chunk is a row of its own, and sees pages in which nothing later is written."""
        case = sequence.case
        chunked = Sequence(sequence.table, StorageFormat(sequence.layout.format), case)
        chunked.write(0, case.start)
        bounds = [case.start, case.start + 1, case.start + 14, case.start + 55, case.context]
        parts = []
        for begin, end in pairwise(bounds):
            chunked.write(begin, end)
            cuts = [*range(begin, end, QUERY_TILE), end]
            parts.append(chunked.attend(cuts, row_start=begin))
        np.testing.assert_array_equal(np.concatenate(parts), whole)

    @pytest.mark.parametrize("spread", [1, 2])
    def test_with_splits_spread_over_items(self, sequence: Sequence, whole: Floats, spread: int) -> None:
        np.testing.assert_array_equal(sequence.attend(sequence.tiles(), spread=spread), whole)

    @pytest.mark.parametrize("spread", [0, 1])
    def test_from_the_first_split_that_is_seen(self, sequence: Sequence, whole: Floats, spread: int) -> None:
        got = sequence.attend(sequence.tiles(), spread=spread, from_first_seen=True)
        np.testing.assert_array_equal(got, whole)

    def test_with_anything_behind_the_end(self, sequence: Sequence, whole: Floats) -> None:
        """As drafts that were refused leave it."""
        case = sequence.case
        longer = Sequence(
            sequence.table, StorageFormat(sequence.layout.format), replace(case, context=case.context + 7)
        )
        for mine, other in ((longer.keys, sequence.keys), (longer.values, sequence.values)):
            mine[: case.context] = other
        longer.write(0, case.context + 7)
        longer.case, longer.queries = case, sequence.queries
        longer.sinks = sequence.sinks
        np.testing.assert_array_equal(longer.attend(longer.tiles()), whole)
