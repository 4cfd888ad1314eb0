"""Ragged paged attention against the torch reference: in Triton's interpreter, or on a GPU where there is one."""

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.cuda.attention.common import PAGE_SLOTS, AttentionShape, PagedKV, RaggedRows
from penstock.kernels.cuda.attention.decode import DecodeWorkspace
from penstock.kernels.cuda.attention.paged import paged_attention
from penstock.kernels.cuda.attention.plan import DecodeShape, WorkStarts, plan_attention
from penstock.kernels.cuda.attention.prefill import prefill_tiles
from penstock.kernels.reference import ops as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = AttentionShape(4, 2, 64, torch.float32, torch.float32, scale=0.125)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Sequences:
    """A step: of each sequence its queries and its context, on random pages."""

    shape: AttentionShape
    lengths: list[tuple[int, int]]
    query: Tensor
    kv: PagedKV
    batch: RaggedRows

    def only(self, chosen: int) -> "Sequences":
        """The same sequence in a step of its own."""
        starts = self.batch.query_starts.tolist()
        length = self.lengths[chosen]
        batch = RaggedRows(
            self.batch.tables,
            self.batch.rows[chosen : chosen + 1].clone(),
            torch.tensor([0, length[0]], dtype=torch.int32, device=DEVICE),
            self.batch.contexts[chosen : chosen + 1].clone(),
        )
        query = self.query[starts[chosen] : starts[chosen + 1]].clone()
        return replace(self, lengths=[length], query=query, batch=batch)

    def chunk(self, begin: int, end: int, context: int) -> "Sequences":
        """Some queries of the only sequence, of which there are ``context`` tokens at their end."""
        starts, contexts = torch.tensor([[0, end - begin], [context, 0]], dtype=torch.int32, device=DEVICE)
        batch = replace(self.batch, query_starts=starts.clone(), contexts=contexts[:1].clone())
        query = self.query[begin:end].clone()
        return replace(self, lengths=[(end - begin, context)], query=query, batch=batch)

    def poisoned(self) -> "Sequences":
        """With NaN wherever no query has to look: other pages, slots past the context, positions before the window."""
        pages = self.kv.pages.float().clone()
        needed = torch.zeros(pages.shape[0], PAGE_SLOTS, dtype=torch.bool, device=DEVICE)
        tables = self.batch.tables.clone()
        for row, (num_queries, context) in zip(self.batch.rows.tolist(), self.lengths, strict=True):
            if num_queries == 0:
                continue
            first = context - num_queries
            lowest = 0
            if self.shape.window is not None:
                window = self.shape.window
                lowest = first // window * window if self.shape.chunked else max(0, first - window + 1)
            positions = torch.arange(lowest, context, device=DEVICE)
            needed[tables[row, positions // PAGE_SLOTS], positions % PAGE_SLOTS] = True
            tables[row, -(-context // PAGE_SLOTS) :] = 1 << 30
            tables[row, : lowest // PAGE_SLOTS] = 1 << 30
        pages[~needed[:, None, None, :].expand(-1, *pages.shape[1:3], -1)] = math.nan
        kv = replace(self.kv, pages=pages.to(self.kv.pages.dtype))
        return replace(self, kv=kv, batch=replace(self.batch, tables=tables))


def sequences(shape: AttentionShape, lengths: list[tuple[int, int]], seed: int = 0, sinks: bool = False) -> Sequences:
    """Of each sequence (queries, context)."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = [-(-context // PAGE_SLOTS) for _, context in lengths]
    ids = torch.randperm(sum(num_pages) + 1, generator=generator, dtype=torch.int32) + 1  # page 0 is nobody's
    num_rows = len(lengths) + 2
    tables = torch.zeros(num_rows, max([*num_pages, 1]) + 1, dtype=torch.int32)
    rows = torch.randperm(num_rows, generator=generator, dtype=torch.int32)[: len(lengths)]
    used = 0
    for row, count in zip(rows.tolist(), num_pages, strict=True):
        tables[row, :count] = ids[used : used + count]
        used += count
    heads = shape.num_kv_heads
    pages = torch.randn(len(ids) + 1, *shape.page_shape, generator=generator)
    scales = torch.ones(2, heads)
    if shape.kv_dtype == torch.float8_e4m3fn:
        scales = torch.rand(2, heads, generator=generator) + 0.5
    query = torch.randn(sum(n for n, _ in lengths), shape.num_heads, shape.key_dim, generator=generator)
    chosen = torch.randn(shape.num_heads, generator=generator) if sinks else torch.full((shape.num_heads,), -math.inf)
    starts = [0, *itertools.accumulate(n for n, _ in lengths)]
    batch = RaggedRows(
        tables.to(DEVICE),
        rows.to(DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=DEVICE),
    )
    pages = pages.to(DEVICE).to(shape.kv_dtype)
    kv = PagedKV(pages, scales[0].clone().to(DEVICE), scales[1].clone().to(DEVICE), chosen.to(DEVICE))
    return Sequences(shape, lengths, query.to(DEVICE).to(shape.dtype), kv, batch)


def computed(step: Sequences, max_queries: int = 1, multiprocessors: int = 2) -> Tensor:
    """By the kernels."""
    shape = DecodeShape(step.shape, max_queries)
    num_sequences = step.batch.num_sequences
    starts = WorkStarts.allocate(num_sequences, DEVICE)
    workspace = DecodeWorkspace.allocate(shape, multiprocessors, DEVICE)
    for room in filter(None, (workspace, workspace.extended)):
        room.mixed.fill_(math.nan)
        room.weights.fill_(math.nan)
    plan_attention(shape, step.batch, starts, multiprocessors)
    out = torch.full_like(step.query[..., step.shape.rotated_dim :], math.nan, memory_format=torch.contiguous_format)
    any_longer = any(n > max_queries for n, _ in step.lengths)
    paged_attention(shape, step.query, step.kv, step.batch, starts, workspace, out, any_longer=any_longer)
    assert not workspace.counters.any(), "the next step would never merge"
    return out


def expected(step: Sequences) -> Tensor:
    """By the reference, in fp32."""
    scales = torch.stack((step.kv.key_scales, step.kv.value_scales))
    pages = step.kv.pages.float().permute(1, 2, 0, 3, 4) * scales[: step.kv.pages.shape[1], :, None, None, None]
    keys, values = pages[0], pages[-1]
    starts = step.batch.query_starts.tolist()
    present = [b for b, (n, _) in enumerate(step.lengths) if n]
    shape = step.shape
    return reference.paged_attention(
        step.query.float(),
        keys,
        values,
        [step.batch.tables[step.batch.rows[b], : -(-step.lengths[b][1] // PAGE_SLOTS)].tolist() for b in present],
        [(starts[b], starts[b + 1]) for b in present],
        [step.lengths[b][1] - step.lengths[b][0] for b in present],
        shape.window,
        scale=shape.scale,
        cap=shape.cap,
        sinks=None if step.kv.sinks.isinf().all() else step.kv.sinks,
        chunked=shape.chunked,
    )[..., shape.rotated_dim :]


def check(step: Sequences, **options) -> None:
    wanted = expected(step)
    got = computed(step.poisoned(), **options)
    tolerance = TOLERANCE[step.shape.dtype]
    torch.testing.assert_close(got.float(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("multiprocessors", [1, 2, 4])
def test_decoding_is_divided_over_any_number_of_multiprocessors(multiprocessors):
    check(sequences(SMALL, [(1, 200), (1, 1), (1, 40), (0, 0), (1, 33)]), multiprocessors=multiprocessors)


def extended(step: Sequences, max_queries: int = 1, multiprocessors: int = 8) -> list[bool]:
    """Which sequences are extended."""
    starts = WorkStarts.allocate(step.batch.num_sequences, DEVICE)
    plan_attention(DecodeShape(step.shape, max_queries), step.batch, starts, multiprocessors)
    units, extended, tiles = (part.diff().bool().tolist() for part in (starts.units, starts.extended, starts.tiles))
    has_queries = [n > 0 for n, _ in step.lengths]
    assert [sum(kinds) for kinds in zip(units, extended, tiles, strict=True)] == has_queries
    return extended


def test_few_queries_on_a_long_context_are_extended():
    """Their tiles would run on a few multiprocessors long after all others have ended."""
    assert extended(sequences(SMALL, [(1, 400), (20, 400), (0, 0), (20, 20)])) == [False, True, False, False]
    assert extended(sequences(SMALL, [(40, 400)] * 2 + [(40, 64)]), multiprocessors=16) == [True, True, False]
    # With enough tiles for all multiprocessors, or with more queries, tiles take less time.
    assert extended(sequences(SMALL, [(40, 400)] * 8)) == [False] * 8
    assert extended(sequences(SMALL, [(300, 400)])) == [False]
    assert extended(sequences(SMALL, [(20, 400)]), multiprocessors=1) == [False]
    assert extended(sequences(SMALL, [(20, 400)]), max_queries=0) == [False]


@pytest.mark.parametrize("window", [None, 20])
def test_extension_beside_decoding_and_prefill(window):
    step = sequences(replace(SMALL, window=window), [(5, 70), (20, 300), (1, 130), (0, 0), (24, 30)])
    assert extended(step, 5, 4)[1]
    check(step, max_queries=5, multiprocessors=4)


@pytest.mark.parametrize("head_dim", [96, 256, pytest.param(512, marks=pytest.mark.soak)])
@pytest.mark.parametrize("fp8", [False, True])
def test_extension_of_head_sizes(head_dim, fp8):
    kv_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    shape = replace(SMALL, head_dim=head_dim, dtype=torch.bfloat16, kv_dtype=kv_dtype, num_heads=3, num_kv_heads=1)
    step = sequences(shape, [(12, 200), (1, 40)], sinks=True)
    assert extended(step, multiprocessors=4) == [True, False]
    check(step, multiprocessors=4)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_prefill_of_odd_lengths(length):
    check(sequences(SMALL, [(length, length), (length, length + 19)], seed=length))


def test_verification_beside_decoding_and_prefill():
    check(sequences(SMALL, [(5, 70), (1, 130), (40, 75), (5, 5), (0, 0), (2, 64)]), max_queries=5)


def test_a_long_verification_has_several_tiles():
    shape = replace(SMALL, num_heads=16)
    check(sequences(shape, [(8, 90), (1, 40)]), max_queries=8, multiprocessors=3)


@pytest.mark.parametrize("window", [1, 20, 64])
def test_window(window):
    shape = replace(SMALL, window=window)
    check(sequences(shape, [(1, 150), (5, 90), (50, 110), (3, 3)]), max_queries=5)


@pytest.mark.parametrize("window", [1, 20, 64])
def test_chunks(window):
    """Their ends are within blocks of positions and between them, and within a tile of queries."""
    shape = replace(SMALL, window=window, chunked=True)
    check(sequences(shape, [(1, 150), (1, 129), (5, 90), (50, 110), (3, 3), (0, 0)]), max_queries=5)


def test_soft_cap_and_sinks():
    shape = replace(SMALL, cap=2.0, scale=0.5)
    check(sequences(shape, [(1, 150), (50, 60)], sinks=True))
    check(sequences(replace(shape, window=20, cap=None), [(1, 150), (50, 60)], sinks=True), multiprocessors=1)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_scores_far_beyond_the_cap():
    check(sequences(replace(SMALL, cap=5.0, scale=100.0), [(1, 40), (20, 20)]))


@pytest.mark.parametrize(("rank", "rotated"), [(48, 8), (512, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents(rank, rotated, dtype):
    """Decoding, verification, extension and prefill of heads that all attend to the same vectors."""
    shape = AttentionShape(6, 1, rank, dtype, dtype, scale=0.1, rotated_dim=rotated)
    lengths = [(1, 70), (3, 40), (0, 0), (20, 33), (17, 300)] if rank < 512 else [(1, 40), (19, 33)]
    check(sequences(shape, lengths), max_queries=3)


@pytest.mark.parametrize("head_dim", [80, 96, 256, 512])
def test_head_sizes(head_dim):
    shape = replace(SMALL, head_dim=head_dim, num_heads=3, num_kv_heads=1)
    check(sequences(shape, [(1, 70), (20, 50)]))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_tiles_without_wide_products(head_dim):
    """They are smaller. The plan counts them."""
    wide = replace(SMALL, head_dim=head_dim, num_heads=3, num_kv_heads=1, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    shape = replace(wide, wide_products=False)
    assert prefill_tiles(shape) != prefill_tiles(wide)
    check(sequences(shape, [(1, 70), (40, 60), (30, 30)]))
    if head_dim == 128:  # those of many decoded rows too
        assert DecodeShape(shape, 20).tiles != DecodeShape(wide, 20).tiles
        check(sequences(shape, [(20, 70), (40, 60), (1, 30)]), max_queries=20)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
def test_dtypes(dtype, fp8):
    shape = replace(SMALL, dtype=dtype, kv_dtype=torch.float8_e4m3fn if fp8 else dtype)
    check(sequences(shape, [(1, 140), (20, 30)]))


@pytest.mark.gpu
@pytest.mark.parametrize("num_queries", [1, 20])
def test_queries_beyond_fp16_are_clamped(num_queries):
    step = sequences(replace(SMALL, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn), [(num_queries, 140)])
    clamped = replace(step, query=(step.query * 1e5).float().clamp(-65504, 65504))
    step = replace(step, query=step.query * 1e5)
    torch.testing.assert_close(computed(step).float(), expected(clamped), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed):
    chosen = random.Random(seed)
    lengths = []
    for _ in range(5):
        num_queries = chosen.choice([0, 1, 1, 2, 5, 9, 21])
        lengths.append((num_queries, num_queries + chosen.choice([0, 0, 7, 31, 64, 130]) if num_queries else 0))
    lengths.append((1, 1 + chosen.randrange(100)))
    shape = replace(SMALL, window=chosen.choice([None, 9, 50]), cap=chosen.choice([None, 3.0]))
    check(
        sequences(shape, lengths, seed, sinks=chosen.random() < 0.5),
        max_queries=chosen.choice([0, 1, 5]),
        multiprocessors=chosen.choice([1, 3, 9]),
    )


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (40, False), (40, True)])
def test_prefill_bits_do_not_depend_on_the_batch_or_the_chunk(window, chunked, rows_alike):
    step = sequences(replace(SMALL, window=window, chunked=chunked), [(1, 230), (60, 100), (5, 120), (1, 40)])
    whole = computed(step, max_queries=0)
    torch.testing.assert_close(whole, expected(step), atol=2e-5, rtol=2e-5)
    starts = step.batch.query_starts.tolist()
    for b, (num_queries, context) in enumerate(step.lengths):
        alone = step.only(b)
        kept = whole[starts[b] : starts[b + 1]]
        assert torch.equal(computed(alone, max_queries=0), kept)
        # As if only some of its queries, and at last one, were computed in a step.
        for begin, end in ((0, num_queries // 2), (num_queries // 2, num_queries), (num_queries - 1, num_queries)):
            if begin < end:
                chunk = alone.chunk(begin, end, context - num_queries + end)
                assert torch.equal(computed(chunk, max_queries=0), kept[begin:end])


@pytest.mark.gpu
@pytest.mark.parametrize("max_queries", [0, 16])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (128, None), (128, 1024), (256, 1024), (512, None)])
def test_real_sizes(head_dim, window, fp8, max_queries):
    kv_dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    shape = AttentionShape(32, 8, head_dim, torch.bfloat16, kv_dtype, head_dim**-0.5, window)
    lengths = [*((1, 1 + 257 * b) for b in range(32)), (5, 4000), (16, 16), (700, 2100), (1500, 1500)]
    lengths += [(40, 20000), (200, 9000)]
    step = sequences(shape, lengths)
    torch.testing.assert_close(
        computed(step.poisoned(), max_queries=max_queries, multiprocessors=132).float(),
        expected(step),
        atol=2e-2,
        rtol=2e-2,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (128, None), (128, 1024), (256, 1024), (512, None)])
def test_bits_at_real_sizes(head_dim, window):
    shape = AttentionShape(32, 8, head_dim, torch.bfloat16, torch.bfloat16, head_dim**-0.5, window)
    step = sequences(shape, [*((1, 1 + 257 * b) for b in range(16)), (700, 2100)])
    whole = computed(step, max_queries=0)
    alone, kept = step.only(16), whole[16:]
    for begin, end in ((0, 300), (300, 700), (299, 300)):
        assert torch.equal(computed(alone.chunk(begin, end, 1400 + end), max_queries=0), kept[begin:end])
    for b in range(16):
        assert torch.equal(computed(step.only(b), max_queries=0), whole[b : b + 1])
