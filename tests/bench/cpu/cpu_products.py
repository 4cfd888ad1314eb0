"""What the CPU library's products reach of what this machine can do, at one core.

Each product is timed with weights that no cache holds: copies of the matrix take turns. The ceiling of a product is the
longer of two times: reading its panels once at the rate of a plain reading loop, and its multiplications at the rate of
a loop that works in registers alone, both measured here. All times are the best of many, since a machine that others
use adds to some of them. torch's F.linear in bfloat16 stands beside it, on one thread and with copies too.

    make bench ARGS=cpu_products
    make bench ARGS='cpu_products --format int8 --rows 1 8 64'
"""

import argparse
import ctypes
import os
import runpy
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from penstock.kernels.cpu.bindings import (
    LANES,
    LEVELS,
    GemmOutput,
    Inputs,
    Kernels,
    Matrix,
    OutputMode,
    StorageFormat,
    find_kernels,
)

SHAPES = ((3072, 1024), (1024, 3072))
"""Outputs and inputs of a matrix."""
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)
COLD_BYTES = 96 << 20
"""Of all copies of a matrix: three times the last cache of the machines these figures were first taken on."""
BUILD = Path(__file__).parents[3] / "kernels/cpu/build.py"


@dataclass(frozen=True)
class Ceilings:
    """Rates per second: bytes read by one core and by two, operations of one core by the format multiplied."""

    read: float
    read_by_two: float
    compute: dict[StorageFormat, float]

    def seconds(self, matrix_format: StorageFormat, num_bytes: int, operations: float) -> float:
        """What a product cannot go below."""
        return max(num_bytes / self.read, operations / self.compute[matrix_format])


def best_seconds(
    work: Callable[[], object], at_least: int, budget: float, clock: Callable[[], float] = time.thread_time
) -> float:
    """The shortest run, of as many as the budget (seconds) allows. Time in which others had the core does not count."""
    best, end, runs = float("inf"), time.perf_counter() + budget, 0
    while runs < at_least or time.perf_counter() < end:
        start = clock()
        work()
        best = min(best, clock() - start)
        runs += 1
    return best


def aligned(num_bytes: int) -> np.ndarray:
    """Zeroed bytes at a multiple of 2 MiB, where large pages can hold them."""
    room = np.zeros(num_bytes + (2 << 20), dtype=np.uint8)
    begin = -room.ctypes.data % (2 << 20)
    return room[begin : begin + num_bytes]


def build_loops() -> ctypes.CDLL:
    """The loops of cpu_ceilings.cpp, compiled for this very machine."""
    compiler = runpy.run_path(str(BUILD))["find_compiler"]()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "ceilings.so"
        source = Path(__file__).with_name("cpu_ceilings.cpp")
        flags = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-Wno-psabi"]
        subprocess.run([*compiler, *flags, str(source), "-o", str(library)], check=True)
        loops = ctypes.CDLL(str(library))
    loops.compute.argtypes, loops.compute.restype = [ctypes.c_int32, ctypes.c_int64], ctypes.c_int64
    loops.read_memory.argtypes, loops.read_memory.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64
    return loops


def measure_ceilings() -> Ceilings:
    """About three seconds."""
    loops = build_loops()
    memory = aligned(2 * COLD_BYTES)
    memory[:] = 1

    def read(begin: int) -> None:
        loops.read_memory(memory.ctypes.data + begin, COLD_BYTES)

    def read_by_two() -> None:
        threads = [threading.Thread(target=read, args=(begin,)) for begin in (0, COLD_BYTES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def compute(kind: StorageFormat) -> float:
        operations = loops.compute(kind, 20_000)
        return operations / best_seconds(lambda: loops.compute(kind, 20_000), 20, 0.3) if operations else 0

    rates = {kind: compute(kind) for kind in (StorageFormat.F32, StorageFormat.BF16, StorageFormat.INT8)}
    # Without instructions of their own they are multiplied as float32 is.
    rates = {kind: rate or rates[StorageFormat.F32] for kind, rate in rates.items()}
    return Ceilings(
        COLD_BYTES / best_seconds(lambda: read(0), 10, 1),
        2 * COLD_BYTES / best_seconds(read_by_two, 10, 1, time.perf_counter),
        {**rates, StorageFormat.INT4: rates[StorageFormat.INT8]},
    )


class Product:
    """A matrix with random weights, in copies enough that each use finds it in memory alone."""

    def __init__(self, table: Kernels, matrix_format: StorageFormat, outputs: int, columns: int, group: int) -> None:
        self._table, self._columns = table, columns
        self._group = group if matrix_format == StorageFormat.INT4 else 0
        self._panels = outputs // LANES
        panel_bytes = table.panel_bytes(matrix_format, columns, self._group)
        self.num_bytes = self._panels * panel_bytes
        copies = -(-COLD_BYTES // self.num_bytes)
        self._memory = aligned(copies * self.num_bytes).reshape(copies, -1)
        weights = np.random.default_rng(0).standard_normal((outputs, columns)).astype(np.float32)
        for panel in range(self._panels):
            some = weights[panel * LANES : (panel + 1) * LANES]
            rows = (ctypes.POINTER(ctypes.c_float) * LANES)(
                *(row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for row in some)
            )
            to = self._memory.ctypes.data + panel * panel_bytes
            table.pack_panel(matrix_format, columns, self._group, rows, to, (ctypes.c_double * 2)())
        self._memory[1:] = self._memory[0]
        self._matrix = Matrix(matrix_format, outputs, columns, self._group, panel_bytes, 0, None, None)

    def best(self, num_rows: int, budget: float) -> float:
        """Seconds of the product with so many rows of inputs."""
        matrix, outputs = self._matrix, self._panels * LANES
        stride = self._table.input_bytes(matrix.format, self._columns, self._group)
        x = np.random.default_rng(1).standard_normal((num_rows, self._columns)).astype(np.float32)
        prepared, out = aligned(num_rows * stride), aligned(num_rows * outputs * 4)
        for i, row in enumerate(x):
            to = prepared.ctypes.data + i * stride
            self._table.prepare(matrix.format, self._columns, self._group, row.ctypes.data, to)
        inputs = Inputs(prepared.ctypes.data, stride, num_rows)
        output = GemmOutput(out.ctypes.data, outputs, OutputMode.STORE, 0)
        product, turn = self._table.product, 0

        def use(panels: int) -> None:
            nonlocal turn
            turn = (turn + 1) % len(self._memory)
            matrix.panels = self._memory[turn].ctypes.data
            product(matrix, inputs, 0, panels, output)

        call = best_seconds(lambda: use(0), 100, 0)  # what Python and ctypes add
        return best_seconds(lambda: use(self._panels), 2 * len(self._memory), budget) - call


def best_of_torch(outputs: int, columns: int, num_rows: int, budget: float) -> float:
    """Seconds of F.linear in bfloat16."""
    copies = -(-COLD_BYTES // (outputs * columns * 2))
    weights = torch.randn(outputs, columns).bfloat16().expand(copies, -1, -1).contiguous()
    x, turn = torch.randn(num_rows, columns).bfloat16(), 0

    def use() -> None:
        nonlocal turn
        turn = (turn + 1) % copies
        torch.nn.functional.linear(x, weights[turn])

    with torch.inference_mode():
        return best_seconds(use, 2 * copies, budget)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [kind.name.lower() for kind in StorageFormat]
    parser.add_argument("--format", choices=names, default="bf16", help="of the weights (default: %(default)s)")
    parser.add_argument("--group", type=int, default=32, help="columns that share a scale, int4 (default: %(default)s)")
    parser.add_argument("--level", choices=LEVELS, help="instruction set (default: the best one)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of inputs (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each figure (default: %(default)s)")
    arguments = parser.parse_args()
    table, kind = find_kernels(arguments.level), StorageFormat[arguments.format.upper()]
    if table is None:
        parser.error(f"this machine has no {arguments.level}")
    torch.set_num_threads(1)
    ceilings = measure_ceilings()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(
        f"{table.name.decode()}, {arguments.format}; one core reads {ceilings.read / 1e9:.1f} GB/s (two"
        f" {ceilings.read_by_two / 1e9:.1f}) and multiplies {ceilings.compute[kind] / 1e9:.0f} GOP/s"
    )
    for outputs, columns in SHAPES:
        product = Product(table, kind, outputs, columns, arguments.group)
        print(f"\nN={outputs} K={columns}  {'us':>9} {'GB/s':>6} {'GOP/s':>6} {'ceiling':>8} {'F.linear bf16, us':>18}")
        for num_rows in arguments.rows:
            seconds = product.best(num_rows, arguments.budget)
            operations = 2.0 * num_rows * outputs * columns
            share = ceilings.seconds(kind, product.num_bytes, operations) / seconds
            peer = best_of_torch(outputs, columns, num_rows, arguments.budget)
            print(
                f"{num_rows:>14}  {1e6 * seconds:>9.0f} {product.num_bytes / seconds / 1e9:>6.1f}"
                f" {operations / seconds / 1e9:>6.0f} {share:>8.0%} {1e6 * peer:>11.0f} {peer / seconds:>5.1f}x"
            )


if __name__ == "__main__":
    main()
