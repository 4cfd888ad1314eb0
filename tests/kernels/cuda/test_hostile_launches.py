"""What the tests of this folder would find in a kernel, planted in small ones; and addresses beyond 32 bits."""

import faulthandler
import inspect
import mmap
import os
import signal
import textwrap
import warnings

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.testing import assert_close
from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

from penstock.kernels.cuda.attention import common, decode, prefill
from penstock.kernels.cuda.attention.common import PAGE_SLOTS, AttentionShape, PagedKV, RaggedRows
from penstock.kernels.cuda.attention.decode import DecodeWorkspace
from penstock.kernels.cuda.attention.paged import paged_attention
from penstock.kernels.cuda.attention.plan import DecodeShape, WorkStarts, plan_attention
from penstock.kernels.cuda.core.launch import KernelVariant
from penstock.kernels.cuda.rope_kv import rope_kv
from penstock.kernels.cuda.step import DeviceRows, StepTensors, prepare

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about the interpreter")

NORESERVE = 0x4000
"""Linux's MAP_NORESERVE: memory that is never touched takes nothing."""
SHAPE = AttentionShape(4, 2, 64, torch.float16, torch.float16, scale=0.125)
PAGE_NUMBERS = 2 * 2 * PAGE_SLOTS * 64
FAR = (1 << 31) // PAGE_NUMBERS
"""The first page whose numbers no int32 counts."""


@pytest.fixture(autouse=True)
def overflow_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only here are numbers so large; see ``make_interpreter_fast``."""
    monkeypatch.setattr(interpreter_builder, "options", InterpreterOptions())


@triton.jit
def _shift(x, out, COUNT: tl.constexpr, BLOCK: tl.constexpr, BY: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + BY, mask=at < COUNT), mask=at < COUNT)


@triton.jit
def _last(out):
    tl.store(out, tl.program_id(0) * 10 + tl.program_id(1))


def shift(count: int, by: int) -> None:
    """Copies numbers from ``by`` places further on."""
    x = torch.arange(count, dtype=torch.int32)
    constants = {"COUNT": count, "BLOCK": triton.next_power_of_2(count), "BY": by}
    KernelVariant(_shift, {"x": torch.int32, "out": torch.int32}, constants).launch((1,), x, torch.empty_like(x))


def ends_by(run, *args) -> int:
    """The signal that ends a process that runs this; 0: none does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        run(*args)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.parametrize("count", [4, 100, 1024, 4096])
def test_a_read_past_the_end_of_a_tensor_ends_the_process(count):
    assert ends_by(shift, count, 1) == signal.SIGSEGV
    assert ends_by(shift, count, 0) == 0


def test_a_result_that_depends_on_the_order_of_programs_changes():
    variant, found = KernelVariant(_last, {"out": torch.int32}, {}), set()
    for _ in range(20):
        out = torch.zeros(1, dtype=torch.int32)
        variant.launch((3, 4), out)
        found.add(int(out))
    assert len(found) > 1


@pytest.fixture
def far_pages(monkeypatch) -> Tensor:
    """(pages, 2, K, 16, D), whose numbers are more than an int32 counts. Only pages that are used take memory."""
    monkeypatch.undo()  # a copy of all of them would take memory
    # As many before them, where an address that lost its upper bits would be.
    size = 2 * (FAR * PAGE_NUMBERS) + 8 * PAGE_NUMBERS
    mapped = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    numbers = torch.frombuffer(mapped, dtype=torch.float16)[FAR * PAGE_NUMBERS :]
    return numbers.view(-1, 2, 2, PAGE_SLOTS, 64)


def attend(pages: Tensor, first: int, lengths: list[tuple[int, int]], max_queries: int) -> Tensor:
    """The attention of sequences on pages from ``first`` on."""
    torch.manual_seed(1)
    counts = [-(-context // PAGE_SLOTS) for _, context in lengths]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for sequence, count in enumerate(counts):
        tables[sequence, :count] = torch.arange(first, first + count)
        for page in range(first, first + count):
            pages[page] = torch.randn(pages.shape[1:])
        first += count
    query = torch.randn(sum(queries for queries, _ in lengths), 4, 64).half()
    kv = PagedKV(pages, torch.ones(2), torch.ones(2), torch.full((4,), -torch.inf))
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    batch = RaggedRows(tables, torch.arange(len(lengths), dtype=torch.int32), starts, contexts)
    shape = DecodeShape(SHAPE, max_queries)
    work, room = WorkStarts.allocate(len(lengths), query.device), DecodeWorkspace.allocate(shape, 2, query.device)
    plan_attention(shape, batch, work, 2)
    out = torch.full_like(query, torch.nan)
    paged_attention(shape, query, kv, batch, work, room, out, any_longer=True)
    return out


LENGTHS = [(1, 40), (20, 33)]


def test_attention_finds_pages_beyond_32_bits(far_pages):
    near, far = (attend(far_pages, first, LENGTHS, 1) for first in (0, FAR))
    assert torch.equal(near, far)
    assert near.isfinite().all()


@pytest.mark.parametrize("kernel", [decode, prefill])
def test_an_offset_of_32_bits_is_found(kernel, far_pages, monkeypatch, tmp_path):
    """As it would be without the conversion of the page's id."""
    source = textwrap.dedent(inspect.getsource(common.attend.fn))
    planted = source.replace("page.to(tl.int64)", "page")
    assert planted != source
    file = tmp_path / "planted.py"
    file.write_text(planted)
    names = dict(vars(common))
    exec(compile(planted, str(file), "exec"), names)
    monkeypatch.setattr(kernel, "attend", names["attend"])
    near, far = (attend(far_pages, first, LENGTHS, 1) for first in (0, FAR))
    assert not torch.equal(near, far)


def test_keys_and_values_are_written_beyond_32_bits(far_pages):
    tokens, heads = 5, (4 + 2 * 2) * 64
    qkv = torch.randn(tokens, heads).half()
    angles = torch.randn(8, 32)
    written = []
    for first in (0, FAR):
        slots = first * PAGE_SLOTS + torch.tensor([3, 40, 17, 0, 21])
        query = qkv.new_empty(tokens, 4, 64)
        rope_kv(qkv, angles.cos(), angles.sin(), torch.arange(tokens, dtype=torch.int32), slots, query, far_pages)
        written.append(far_pages[first : first + 3].clone())
    assert torch.equal(*written)
    assert written[0].count_nonzero() == tokens * 2 * 2 * 64


def test_slots_are_counted_beyond_32_bits():
    page = (1 << 31) // PAGE_SLOTS + 5

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rows = DeviceRows(integers(page).view(1, 1), integers(2), integers(-1), torch.zeros(1, 16, dtype=torch.int32))
    step = StepTensors(
        rows=integers(0), num_queries=integers(3), given=integers(5, 6, 7), token_ids=integers(0, 0, 0),
        positions=integers(0, 0, 0), slots=torch.zeros(3, dtype=torch.int64), query_starts=integers(0, 0),
        contexts=integers(0),
    )  # fmt: skip
    prepare(rows, step, PAGE_SLOTS, 10)
    assert_close(step.slots, page * PAGE_SLOTS + torch.tensor([2, 3, 4]))
