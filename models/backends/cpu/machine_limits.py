"""Measures what a machine does at best: the bytes that its compute threads read in a second, and the operations of
matrix products whose operands stay in the caches. The best of many short runs counts, since what else the machine does
can only slow them down."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import GemmOutput, Inputs, Kernels, Matrix, OutputMode, StorageFormat, address
from penstock.kernels.cpu.program import ElementType, Library, Memory
from penstock.models.backends.cpu.stage_limits import FLOATS, MachineLimits, arithmetic

READ_BYTES = 1 << 30
"""More than the caches of most machines hold."""
SECONDS = 0.3
"""How long each pattern is repeated."""
COLUMNS, ROWS = 1024, 256
"""The shape of the matrix whose product is timed: it stays in a core's cache in any format."""


def measure_limits(
    library: Library, kernels: Kernels, formats: Iterable[StorageFormat], read_bytes: int = READ_BYTES
) -> MachineLimits:
    """Measures with as many threads as the library has, for the arithmetic of these formats, and by reading
    ``read_bytes`` of memory."""
    kinds = {arithmetic(format) for format in formats} | {"bfloat16"}
    measured = {StorageFormat.F32, StorageFormat.BF16, *([StorageFormat.INT8] if "int8" in kinds else [])}
    rates = {arithmetic(format): _multiply(library, kernels, format) for format in sorted(measured)}
    # Where no instruction multiplies bfloat16, float32 may be as fast.
    rates["bfloat16"] = max(rates[name] for name in FLOATS.values())
    return MachineLimits(_read(library, kernels, read_bytes), {name: rates[name] for name in sorted(kinds)})


def _read(library: Library, kernels: Kernels, read_bytes: int) -> float:
    """Returns bytes per second: the better of two patterns, a sum over the whole memory and a product with one row."""
    threads = library.num_threads
    memory = library.shared_memory(read_bytes)
    memory.populate(0, read_bytes)
    panel_bytes = int(kernels.panel_bytes(StorageFormat.BF16, COLUMNS, 0))
    panels = read_bytes // threads // panel_bytes
    part_bytes = panels * panel_bytes

    def sum_up(thread: int) -> None:
        np.add.reduce(_numbers(memory, thread * part_bytes, part_bytes))

    products = [
        _Product(kernels, StorageFormat.BF16, 16 * panels, memory.address + thread * part_bytes, 1)
        for thread in range(threads)
    ]
    best = min(_best(threads, sum_up), _best(threads, lambda thread: products[thread].run()))
    return threads * part_bytes / best


def _multiply(library: Library, kernels: Kernels, format: StorageFormat) -> float:
    """Returns operations per second."""
    panel_bytes = int(kernels.panel_bytes(format, COLUMNS, 0))
    memory = library.memory(ROWS // 16 * panel_bytes)
    matrix = Matrix(format=format, rows=ROWS, columns=COLUMNS, panel_bytes=panel_bytes, panels=memory.address)
    weights = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    rows = np.uint64(address(weights)) + np.arange(ROWS, dtype=np.uint64) * np.uint64(weights.strides[0])
    library.pack(kernels, matrix, rows, ElementType.F32, 4)
    count, repeats = int(kernels.product_rows(format)), 8
    products = [_Product(kernels, format, ROWS, memory.address, count) for _ in range(library.num_threads)]

    def run(thread: int) -> None:
        for _ in range(repeats):
            products[thread].run()

    seconds = _best(library.num_threads, run)
    return 2.0 * ROWS * COLUMNS * count * repeats * library.num_threads / seconds


class _Product:
    """A product of a thread's own: rows with a matrix."""

    def __init__(self, kernels: Kernels, format: StorageFormat, rows: int, panels: int, count: int) -> None:
        """``count`` is the number of input rows."""
        self._kernels = kernels
        self._matrix = Matrix(
            format=format, rows=rows, columns=COLUMNS, panels=panels,
            panel_bytes=kernels.panel_bytes(format, COLUMNS, 0),
        )  # fmt: skip
        stride = int(kernels.input_bytes(format, COLUMNS, 0))
        # Aligned as the library's own memory is.
        self._data = np.zeros(count * stride + 64, dtype=np.uint8)
        begin = -address(self._data) % 64 + address(self._data)
        self._output = np.empty((count, rows), dtype=np.float32)
        self._inputs = Inputs(begin, stride, count)
        self._to = GemmOutput(address(self._output), rows, OutputMode.STORE)
        x = np.random.default_rng(1).standard_normal(COLUMNS, dtype=np.float32)
        for row in range(count):
            kernels.prepare(format, COLUMNS, 0, address(x), begin + row * stride)

    def run(self) -> None:
        self._kernels.product(self._matrix, self._inputs, 0, self._matrix.rows // 16, self._to)


def _numbers(memory: Memory, begin: int, num_bytes: int) -> NDArray[np.uint64]:
    """Returns a part of the library's memory as an array. The memory must outlive it."""
    numbers = (ctypes.c_uint64 * (num_bytes // 8)).from_address(memory.address + begin)
    return np.ctypeslib.as_array(numbers)


def _best(num_threads: int, run: Callable[[int], object]) -> float:
    """Returns the least seconds in which all threads run once, side by side."""
    start = threading.Barrier(num_threads)

    def timed(thread: int) -> tuple[float, float]:
        start.wait()
        began = time.perf_counter()
        run(thread)
        return began, time.perf_counter()

    best = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        end = time.perf_counter() + SECONDS
        while True:
            times = list(pool.map(timed, range(num_threads)))
            best = min(best, max(ended for _, ended in times) - min(began for began, _ in times))
            if time.perf_counter() > end:
                return best
