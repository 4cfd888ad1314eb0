"""The tile registers of ``core/amx.h``: what they add up, and what they refuse. Those in software give the same bits as
those of the processor."""

import struct
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.kernels.cpu import build as build_cpu
from penstock.kernels.cpu.bindings import find_kernels
from penstock.kernels.cpu.build import CannotBuild, find_compiler

PROBE = Path(__file__).parent / "tiles_probe.cpp"
NO_TILES = 77
FLOATS, INTEGERS, A, B = range(4)  # as the probe numbers its tiles and blocks

MULTIPLY = ("load", "pairs", "quads", "store")
WHOLE = (16, 16, 16)
SIZES = (WHOLE, (1, 16, 16), (16, 1, 16), (16, 16, 1), (3, 5, 7), (13, 16, 2), (16, 8, 16))
"""Rows of a, rows of b, and columns, which have 4 bytes."""

Blocks = NDArray[np.uint8]
Probe = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def build(cpu_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Probe]:
    """Compiles the probe with some more flags, and tells how to run it on cases with some arguments."""
    if find_kernels("avx512_bf16", cpu_library) is None:
        pytest.skip("this machine has no avx512_bf16")
    try:
        compiler = find_compiler()
    except CannotBuild:
        pytest.skip("needs a C++ compiler")

    def build(*extra: str) -> Probe:
        made = tmp_path_factory.mktemp("probe") / "probe"
        flags = [*build_cpu.COMMON, *build_cpu.level_flags("amx.cpp"), f"-I{build_cpu.SOURCES}", *extra]
        subprocess.run([*compiler, *flags, str(PROBE), "-o", str(made)], check=True, timeout=120)
        return lambda cases, *what: subprocess.run(
            [str(made), *what], input=b"".join(cases), capture_output=True, timeout=120, check=False
        )

    return build


@pytest.fixture(scope="module")
def software(build: Callable[..., Probe]) -> Probe:
    return build(*build_cpu.SOFTWARE)


@pytest.fixture(scope="module")
def processor(build: Callable[..., Probe]) -> Probe:
    probe = build()
    if probe([]).returncode == NO_TILES:
        pytest.skip("this machine has no amx")
    return probe


@pytest.fixture(params=["processor", "software"])
def probe(request: pytest.FixtureRequest) -> Probe:
    """Both in turn."""
    found: Probe = request.getfixturevalue(request.param)
    return found


def configuration(
    rows: int = 16, depth: int = 16, columns: int = 16, *, palette: int = 1, **changed: tuple[int, int]
) -> bytes:
    """Tiles for such a product; ``tile2=(rows, bytes)`` configures another shape."""
    tiles = {FLOATS: (rows, 4 * columns), INTEGERS: (rows, 4 * columns), A: (rows, 4 * depth), B: (depth, 4 * columns)}
    tiles |= {int(name.removeprefix("tile")): shape for name, shape in changed.items()}
    shapes = [tiles.get(i, (0, 0)) for i in range(16)]
    return struct.pack("<BB14x16H16B", palette, 0, *(shape[1] for shape in shapes), *(shape[0] for shape in shapes))


def multiply(probe: Probe, blocks: Iterable[Blocks], sizes: Iterable[tuple[int, int, int]]) -> list[Blocks]:
    """What is in the blocks after both products of each case."""
    cases = [configuration(*size) + block.tobytes() for block, size in zip(blocks, sizes, strict=True)]
    done = probe(cases, *MULTIPLY)
    assert done.returncode == 0, done.stderr
    return list(np.frombuffer(done.stdout, dtype=np.uint8).reshape(len(cases), 4, 16, 64))


def test_sums_of_small_integers_are_exact(probe: Probe) -> None:
    """And nothing is read or written beyond what the tiles have."""
    rng = np.random.default_rng(1)
    for size in SIZES:
        rows, depth, columns = size
        blocks = rng.integers(0, 256, (4, 16, 64), dtype=np.uint8)
        expected = blocks.copy()
        a, b = blocks[A, :rows, : 4 * depth], blocks[B, :depth, : 4 * columns]
        order = b.reshape(depth, columns, 4).swapaxes(1, 2).reshape(4 * depth, columns)
        sums = expected[INTEGERS, :rows, : 4 * columns].copy().view(np.uint32)
        sums += (a.view(np.int8).astype(np.int64) @ order.astype(np.int64)).astype(np.uint32)
        expected[INTEGERS, :rows, : 4 * columns] = sums.view(np.uint8)
        [found] = multiply(probe, [blocks], [size])
        np.testing.assert_array_equal(found[INTEGERS:], expected[INTEGERS:])


def test_sums_of_whole_floats_are_exact(probe: Probe) -> None:
    rng = np.random.default_rng(2)
    for size in SIZES:
        rows, depth, columns = size
        values = rng.integers(-64, 64, (4, 16, 32)).astype(np.float32)
        blocks = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        blocks[FLOATS] = values[FLOATS, :, :16].copy().view(np.uint8)
        expected = blocks.copy()
        order = values[B, :depth, : 2 * columns].reshape(depth, columns, 2).swapaxes(1, 2).reshape(2 * depth, columns)
        sums = values[FLOATS, :rows, :columns] + values[A, :rows, : 2 * depth] @ order
        expected[FLOATS, :rows, : 4 * columns] = np.ascontiguousarray(sums).view(np.uint8)
        [found] = multiply(probe, [blocks], [size])
        np.testing.assert_array_equal(found[FLOATS], expected[FLOATS])


def random_blocks(rng: np.random.Generator, a: tuple[int, int], b: tuple[int, int], special: float) -> Blocks:
    """Random bits, but exponents in two intervals, and sums' in that of the products; some numbers are zero, denormal,
    infinite, or not a number."""
    blocks = rng.integers(0, 2**32, (4, 16, 16), dtype=np.uint32)
    intervals = {A: a, B: b, FLOATS: (max(a[0] + b[0] - 127, 0), min(a[1] + b[1] - 127, 254))}
    for i, (low, high) in intervals.items():
        exponents = rng.integers(low, high + 1, (16, 16, 2), dtype=np.uint16) << 7
        halves = blocks[i].view(np.uint16).reshape(16, 16, 2)  # a float's exponent is in the second
        halves[...] = halves & 0x807F | exponents
        drawn = rng.random(halves.shape) < special
        kinds = np.array([0, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81], dtype=np.uint16)
        halves[drawn] = rng.choice(kinds, drawn.sum())
    return blocks.view(np.uint8)


# Biased exponents of a and b.
ORDINARY, SUMS_NEAR_DENORMAL = ((120, 134), (120, 134)), ((56, 70), (56, 70))
SOME_DENORMAL, SUMS_NEAR_INFINITY = ((0, 3), (120, 190)), ((186, 194), (186, 194))


def test_software_gives_the_bits_of_the_processor(processor: Probe, software: Probe) -> None:
    rng = np.random.default_rng(3)
    blocks, sizes = [], []
    for exponents in (ORDINARY, SUMS_NEAR_DENORMAL, SOME_DENORMAL, SUMS_NEAR_INFINITY):
        for special in (0, 0, 0.01):
            for _ in range(100):
                rows, depth, columns = rng.integers(1, 17, 3).tolist()
                sizes.append(WHOLE if rng.random() < 0.5 else (rows, depth, columns))
                blocks.append(random_blocks(rng, *exponents, special))
    for i, (expected, found) in enumerate(
        zip(multiply(processor, blocks, sizes), multiply(software, blocks, sizes), strict=True)
    ):
        np.testing.assert_array_equal(found[INTEGERS:], expected[INTEGERS:], str(i))
        sums, others = expected[FLOATS].view(np.float32), found[FLOATS].view(np.float32)
        numbers = ~np.isnan(sums)
        np.testing.assert_array_equal(~np.isnan(others), numbers, str(i))
        np.testing.assert_array_equal(others[numbers].view(np.int32), sums[numbers].view(np.int32), str(i))


REFUSED = {
    "more rows than a tile has": (configuration(tile2=(17, 64)), ()),
    "more bytes than a row has": (configuration(tile2=(16, 68)), ()),
    "rows without bytes": (configuration(tile4=(1, 0)), ()),
    "bytes without rows": (configuration(tile4=(0, 4)), ()),
    "a ninth tile": (configuration(tile8=(1, 4)), ()),
    "another palette": (configuration(palette=2), ()),
    "a tile that is not configured, loaded": (configuration(tile2=(0, 0)), ("load",)),
    "a tile that is not configured, stored": (configuration(tile2=(0, 0)), ("store",)),
    "a tile that is not configured, zeroed": (configuration(tile2=(0, 0)), ("zero",)),
    "a tile that is not configured, multiplied": (configuration(tile0=(0, 0)), ("pairs",)),
    "a tile that was released": (configuration(), ("release", "load")),
    "rows of a and c that differ": (configuration(tile2=(15, 64)), ("pairs",)),
    "columns of a that are not rows of b": (configuration(tile2=(16, 60)), ("pairs",)),
    "rows of b that are not columns of a": (configuration(tile3=(15, 64)), ("quads",)),
    "columns of b and c that differ": (configuration(tile3=(16, 60)), ("quads",)),
    "part of a column": (configuration(tile1=(16, 62), tile3=(16, 62)), ("quads",)),
}


@pytest.mark.parametrize(("shapes", "what"), REFUSED.values(), ids=REFUSED)
def test_what_a_processor_refuses_ends_the_process(probe: Probe, shapes: bytes, what: tuple[str, ...]) -> None:
    assert probe([shapes + bytes(4 * 16 * 64)], *what).returncode not in (0, NO_TILES)


def test_the_same_is_not_refused_if_configured(probe: Probe) -> None:
    case = configuration() + bytes(4 * 16 * 64)
    assert probe([case], "load", "zero", "pairs", "quads", "store", "release").returncode == 0
