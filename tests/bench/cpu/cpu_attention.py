"""What the CPU library's attention reaches of what one core of this machine can do, for each format of KV.

Decode reads pages that no cache holds, scattered over memory: its ceiling is the rate of a plain reading loop. A chunk
of a prompt multiplies: its ceiling is the rate of a loop in registers alone; that of the packed product with 128 rows
stands beside it. INT8 keeps queries and weights in two bytes, so it does twice the operations that are counted here.
Items are timed one by one and the shortest time is taken, since a machine that others use adds to some of them. Errors
are those of the root mean square against float64, in thousandths.

    make bench ARGS=cpu_attention
    make bench ARGS='cpu_attention --format bf16 --heads 32 --kv-heads 4'
"""

import argparse
import os
import runpy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.kernels.cpu.bindings import (
    LANES,
    LEVELS,
    LIBRARY,
    QUERY_TILE,
    SPLIT,
    AttentionItem,
    AttentionRow,
    Kernels,
    KvLayout,
    PagedAttention,
    StorageFormat,
    find_kernels,
)

DECODE = ((8, 1024), (4, 4096))
"""Rows and context."""
PREFILL = ((128, 0), (128, 1024), (128, 4096), (512, 0), (512, 1024), (512, 4096))
"""Tokens of a chunk and those before it."""
COLD_BYTES = 96 << 20
FORMATS = (StorageFormat.BF16, StorageFormat.INT8, StorageFormat.F32)


@dataclass(frozen=True)
class Shape:
    """A layer's heads."""

    num_heads: int
    kv_heads: int
    head_dim: int

    def layout(self, kv_format: StorageFormat) -> KvLayout:
        """Pages of a format, as kernels.h draws them."""
        padded = -(-self.head_dim // LANES) * LANES
        head_bytes = {
            StorageFormat.F32: 128 * padded,
            StorageFormat.BF16: 64 * padded,
            StorageFormat.INT8: 32 * padded + 128,
        }[kv_format]
        return KvLayout(kv_format, self.kv_heads, self.head_dim, head_bytes, head_bytes * self.kv_heads)


class Pages:
    """Scattered pages of one format, more than a cache holds, with random KV in all of them."""

    def __init__(self, table: Kernels, shape: Shape, kv_format: StorageFormat, aligned: Callable[[int], Any]) -> None:
        self._table, self._shape, self._layout = table, shape, shape.layout(kv_format)
        self.bytes_of_token = self._layout.page_bytes / LANES
        rng = np.random.default_rng(0)
        size = self._layout.page_bytes
        self._num_pages = -(-COLD_BYTES // size)
        self._memory = aligned(self._num_pages * size)
        self._page_ids = rng.permutation(self._num_pages).astype(np.int32)
        self.keys, self.values = rng.standard_normal((2, LANES, shape.kv_heads, shape.head_dim), np.float32)
        self.write()
        self._memory.reshape(self._num_pages, size)[:] = self._memory[:size]
        self.queries = rng.standard_normal((QUERY_TILE, shape.num_heads, shape.head_dim), np.float32)
        self.outputs = np.zeros_like(self.queries)
        self._attention = PagedAttention(
            self._layout, self._memory.ctypes.data, shape.num_heads, 0, 0, shape.head_dim**-0.5, 0, None,
            self.queries.ctypes.data, shape.num_heads * shape.head_dim,
            self.outputs.ctypes.data, shape.num_heads * shape.head_dim,
        )  # fmt: skip
        self._scratch = aligned(table.attention_scratch(self._attention))

    def write(self) -> None:
        """Fills the first page."""
        keys, values, stride = self.keys.ctypes.data, self.values.ctypes.data, self.keys[0].size
        self._table.write_kv(self._layout, self._memory.ctypes.data, 0, LANES, keys, values, stride)

    def attend(self, begin: int, end: int, kv_head: int, first_page: int = 0) -> float:
        """Seconds of the queries at positions [begin, end) of a row whose pages start at one of the scattered ones."""
        row = AttentionRow(self._page_ids.ctypes.data + 4 * first_page, 0, begin, end)
        item = AttentionItem(0, kv_head, kv_head + 1, begin, end, 0, (end - 1) // SPLIT + 1, -1)
        start = time.perf_counter()
        self._table.attend(self._attention, row, item, self._scratch.ctypes.data, None)
        return time.perf_counter() - start

    def best(self, begin: int, end: int, budget: float) -> float:
        """The same for all KV heads: that many times the shortest item."""
        pages, page, best = -(-end // LANES), 0, float("inf")
        stop = time.perf_counter() + budget
        while time.perf_counter() < stop:
            for kv_head in range(self._shape.kv_heads):
                best = min(best, self.attend(begin, end, kv_head, page))
            page = (page + pages) % (self._num_pages - pages)
        return best * self._shape.kv_heads

    def error(self) -> float:
        """Of one query after 16 tokens, against float64."""
        shape = self._shape
        for kv_head in range(shape.kv_heads):
            self.attend(LANES - 1, LANES, kv_head)
        heads = self.queries[0].astype(np.float64).reshape(shape.kv_heads, -1, shape.head_dim)
        scores = np.einsum("kgd,tkd->kgt", heads, self.keys) * shape.head_dim**-0.5
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        expected = np.einsum("kgt,tkd->kgd", weights, self.values).reshape(-1, shape.head_dim)
        return float(np.sqrt(((self.outputs[0] - expected) ** 2).mean() / (expected**2).mean()))


def report(pages: Pages, shape: Shape, kv_format: StorageFormat, ceilings: Any, budget: float) -> None:
    """One format's lines."""
    write = min(_seconds(pages.write) for _ in range(200)) / LANES
    error = f"error {1e3 * pages.error():.4f} / 1000"
    print(f"\n{kv_format.name}: {error}, KV of a token written in {1e6 * write:.2f} us, ctypes included")
    for rows, context in DECODE:
        seconds = rows * pages.best(context - 1, context, budget)
        rate = rows * context * pages.bytes_of_token / seconds
        name = f"decode, {rows} rows at {context}"
        print(f"{name:<28} {1e3 * seconds:>8.2f} ms {rate / 1e9:>6.1f} GB/s   {rate / ceilings.read:>5.0%} of reading")
    for tokens, before in PREFILL:
        tiles = range(before, before + tokens, QUERY_TILE)
        # Tiles in between cost what their positions say.
        some = list(tiles)[:: max(1, len(tiles) // 4)]
        times = [pages.best(begin, begin + QUERY_TILE, budget / len(some)) for begin in some]
        seconds = float(np.interp(tiles, some, times).sum())
        positions = np.arange(before, before + tokens) + 1
        rate = 4.0 * shape.head_dim * shape.num_heads * float(positions.sum()) / seconds
        peak = ceilings.compute[StorageFormat.F32 if kv_format == StorageFormat.F32 else StorageFormat.BF16]
        name = f"{tokens} tokens after {before}"
        print(f"{name:<28} {1e3 * seconds:>8.2f} ms {rate / 1e9:>6.0f} GFLOP/s {rate / peak:>4.0%} of multiplying")


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [kind.name.lower() for kind in FORMATS]
    parser.add_argument("--format", choices=names, nargs="+", default=names, help="of the pages (default: all)")
    parser.add_argument("--level", choices=LEVELS, help="instruction set (default: the best one)")
    parser.add_argument("--heads", type=int, default=16, help="query heads (default: %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="the size of a head (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each figure (default: %(default)s)")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="another build of the library")
    arguments = parser.parse_args()
    table = find_kernels(arguments.level, arguments.library)
    if table is None:
        parser.error(f"this machine has no {arguments.level}")
    products = runpy.run_path(str(Path(__file__).with_name("cpu_products.py")))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    ceilings = products["measure_ceilings"]()
    shape = Shape(arguments.heads, arguments.kv_heads, arguments.head_dim)
    product = products["Product"](table, StorageFormat.BF16, 3072, 1024, 0)
    dense = 2.0 * 128 * 3072 * 1024 / product.best(128, arguments.budget)
    float32, bf16 = (ceilings.compute[format_] / 1e9 for format_ in (StorageFormat.F32, StorageFormat.BF16))
    print(
        f"{table.name.decode()}, {shape.num_heads} heads over {shape.kv_heads} of {shape.head_dim}; one core"
        f" reads {ceilings.read / 1e9:.1f} GB/s; it multiplies {float32:.0f} GFLOP/s in float32, {bf16:.0f} in bf16,"
        f" and {dense / 1e9:.0f} in the packed bf16 product"
    )
    for kv_format in (StorageFormat[name.upper()] for name in arguments.format):
        pages = Pages(table, shape, kv_format, products["aligned"])
        report(pages, shape, kv_format, ceilings, arguments.budget)


if __name__ == "__main__":
    main()
