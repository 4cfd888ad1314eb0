"""Loads the CPU library and mirrors its types, which are documented in ``csrc/core/kernel_table.h``. Independent of
models."""

import ctypes
import importlib.util
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint16,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LANES = 16
"""Columns in a panel of weights, and tokens in a KV page."""
SPLIT = 256
QUERY_TILE = 16

LIBRARY = Path(__file__).parent / "libpenstock_cpu.so"
"""The library that is built in a checkout."""
SOURCES = Path(__file__).parent / "csrc"
"""The C++ sources; absent from a wheel."""
VARIABLE = "PENSTOCK_CPU_LIBRARY"
"""The environment variable that selects another build of the library."""
PACKAGE = "penstock.cpu_library"
"""The package that contains the library in an installation; penstock-llm-cpu installs it."""
BUILD_IT = "pip install --force-reinstall penstock-llm-cpu; in a checkout, run make native"
"""The remedy for a missing or stale library."""

LEVELS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "neon_bf16", "neon_dot", "neon", "generic")
"""Instruction sets of all machines, best first, except that on Intel avx512_bf16 is slower than avx512_vnni."""


class LibraryMissing(Exception):
    """No library can be loaded. The text has the reason and the remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what, self.remedy = what, remedy


class StorageFormat(IntEnum):
    """The element format of a matrix or a KV page."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3
    FP4 = 4
    Q4_0 = 5


class GemmActivation(IntEnum):
    """The activation of an MLP."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    CLAMPED = 3
    RELU = 4
    RELU_SQUARED = 5


class OutputMode(IntEnum):
    """How a matrix product writes its result."""

    STORE = 0
    ADD = 1
    GATED = 2


class Matrix(Structure):
    """Packed weights."""

    _fields_ = (
        ("format", c_int32), ("rows", c_int32), ("columns", c_int32), ("group", c_int32), ("panel_bytes", c_int64),
        ("panels", c_void_p), ("bias", c_void_p), ("order", c_void_p),
    )  # fmt: skip


class Inputs(Structure):
    """Input rows after ``prepare``."""

    _fields_ = (("data", c_void_p), ("stride", c_int64), ("rows", c_int32), ("following", c_void_p))


class GemmOutput(Structure):
    """The destination of a matrix product."""

    _fields_ = (("data", c_void_p), ("stride", c_int64), ("mode", c_int32), ("activation", c_int32), ("alpha", c_float),
                ("limit", c_float))  # fmt: skip


class KvLayout(Structure):
    """The layout of a KV page."""

    _fields_ = (("format", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32), ("head_bytes", c_int64),
                ("page_bytes", c_int64), ("is_latent", c_int32))  # fmt: skip


class PagedAttention(Structure):
    """One layer's attention over a batch."""

    _fields_ = (
        ("kv", KvLayout), ("pages", c_void_p), ("num_heads", c_int32), ("window", c_int32),
        ("chunked", c_int32), ("scale", c_float),
        ("soft_cap", c_float), ("sinks", c_void_p), ("queries", c_void_p), ("query_stride", c_int64),
        ("output", c_void_p), ("output_stride", c_int64),
    )  # fmt: skip


class AttentionRow(Structure):
    """A row of the batch."""

    _fields_ = (("pages", c_void_p), ("token", c_int32), ("start", c_int32), ("end", c_int32))


class AttentionItem(Structure):
    """A work item: a piece of a row's attention."""

    _fields_ = (
        ("row", c_int32), ("kv_head_begin", c_int32), ("kv_head_end", c_int32), ("query_begin", c_int32),
        ("query_end", c_int32), ("split_begin", c_int32), ("split_end", c_int32), ("partial", c_int64),
    )  # fmt: skip


class StateScan(Structure):
    """Some tokens of one head of a recurrent layer."""

    _fields_ = (
        ("key_size", c_int32), ("value_size", c_int32), ("subtracts", c_int32), ("skip", c_float),
        ("queries", c_void_p), ("keys", c_void_p),
        ("values", c_void_p), ("stride", c_int64), ("decays", c_void_p), ("betas", c_void_p), ("gate_stride", c_int64),
        ("state", c_void_p), ("state_stride", c_int64), ("output", c_void_p), ("output_stride", c_int64),
    )  # fmt: skip


class SamplingRow(Structure):
    """The sampling parameters of a row."""

    _fields_ = (
        ("temperature", c_double), ("top_p", c_double), ("min_p", c_double), ("repetition_penalty", c_double),
        ("presence_penalty", c_double), ("frequency_penalty", c_double), ("seed", c_uint64), ("position", c_int64),
        ("top_k", c_int64), ("num_logprobs", c_int64), ("seen_ids", c_void_p), ("seen_counts", c_void_p),
        ("num_seen", c_int64), ("bias_ids", c_void_p), ("biases", c_void_p), ("num_biases", c_int64),
        ("allowed", c_void_p), ("num_allowed", c_int64), ("mask", c_void_p), ("forbidden", c_void_p),
        ("num_forbidden", c_int64), ("noise_ids", c_void_p),
    )  # fmt: skip


class SampledToken(Structure):
    """The token chosen for a row."""

    _fields_ = (("token_id", c_int64), ("logprob", c_float), ("num_top", c_int32), ("noise", c_double))


_P, _I, _L = c_void_p, c_int32, c_int64


class Kernels(Structure):
    """The function table of one instruction set. Addresses are integers, as returned by ``tensor.ctypes.data`` and
    ``data_ptr()``; structures are passed by reference. Arguments are not checked."""

    _fields_ = (
        ("name", c_char_p),
        ("panel_bytes", CFUNCTYPE(_L, _I, _I, _I)),
        ("input_bytes", CFUNCTYPE(_L, _I, _I, _I)),
        ("pack_panel", CFUNCTYPE(None, _I, _I, _I, POINTER(POINTER(c_float)), _P, POINTER(c_double))),
        ("pack_panel_bf16", CFUNCTYPE(None, _I, POINTER(POINTER(c_uint16)), _P)),
        (
            "pack_panel_codes",
            CFUNCTYPE(None, _I, _I, _I, POINTER(_P), POINTER(POINTER(c_float)), POINTER(POINTER(c_float)), _P),
        ),
        ("unpack_row", CFUNCTYPE(None, POINTER(Matrix), _I, _P)),
        ("prepare", CFUNCTYPE(None, _I, _I, _I, _P, _P)),
        ("product", CFUNCTYPE(None, POINTER(Matrix), POINTER(Inputs), _I, _I, POINTER(GemmOutput))),
        ("product_rows", CFUNCTYPE(_I, _I)),
        ("rms_norm", CFUNCTYPE(None, _P, _P, _I, c_float, _P)),
        ("layer_norm", CFUNCTYPE(None, _P, _P, _P, _I, c_float, _P)),
        ("add", CFUNCTYPE(None, _P, _P, _I)),
        ("scale", CFUNCTYPE(None, _P, c_float, _I)),
        ("soft_cap", CFUNCTYPE(None, _P, c_float, _I)),
        ("gated", CFUNCTYPE(None, _P, _P, _I, _I, _P)),
        ("activate", CFUNCTYPE(None, _P, _I, _I)),
        ("multiply", CFUNCTYPE(None, _P, _P, _I)),
        ("multiply_sigmoid", CFUNCTYPE(None, _P, _P, _I)),
        ("convolve", CFUNCTYPE(None, POINTER(_P), _P, _P, _I, _I, _P)),
        ("scan_state", CFUNCTYPE(None, POINTER(StateScan), _I, _I, _I)),
        ("rotate", CFUNCTYPE(None, _P, _P, _P, _I)),
        ("write_kv", CFUNCTYPE(None, POINTER(KvLayout), _P, _I, _I, _P, _P, c_int64)),
        ("attention_scratch", CFUNCTYPE(_L, POINTER(PagedAttention))),
        ("partial_floats", CFUNCTYPE(_L, POINTER(PagedAttention))),
        ("attend", CFUNCTYPE(None, POINTER(PagedAttention), POINTER(AttentionRow), POINTER(AttentionItem), _P, _P)),
        ("merge", CFUNCTYPE(None, POINTER(PagedAttention), POINTER(AttentionRow), POINTER(AttentionItem), _I, _P)),
        ("sampling_scratch", CFUNCTYPE(_L, _I)),
        ("sample", CFUNCTYPE(None, _P, _I, POINTER(SamplingRow), _P, POINTER(SampledToken), _P, _P)),
        ("logprobs", CFUNCTYPE(None, _P, _I, _I, _I, _P, POINTER(c_float), _P, _P)),
    )


def address(array: NDArray[np.generic]) -> int:
    """The address of a contiguous array. The caller keeps the array alive as long as it uses the address."""
    return int(array.__array_interface__["data"][0])  # several times as fast as array.ctypes


def library_path() -> Path:
    """The path of the library: the one that the environment variable names, the one beside this file, or the installed
    one."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    package = None if SOURCES.is_dir() else importlib.util.find_spec(PACKAGE)
    return LIBRARY if package is None or package.origin is None else Path(package.origin).with_name(LIBRARY.name)


def load_library(path: Path | None = None) -> ctypes.CDLL:
    """Loads the library; its calls release the GIL. Raises LibraryMissing."""
    return _load(path or library_path())


@cache
def _load(path: Path) -> ctypes.CDLL:
    if not path.exists():
        if path != LIBRARY:
            raise LibraryMissing(f"{path}, which {VARIABLE} names, does not exist", f"unset {VARIABLE}")
        if SOURCES.is_dir():
            raise LibraryMissing(
                f"{path} has not been built",
                "run make native; it needs a C++ compiler (Debian, Ubuntu: apt-get install g++)",
            )
        raise LibraryMissing("the CPU library is not installed", "pip install 'penstock-llm[cpu]'")
    try:
        library = ctypes.CDLL(str(path))
        library.penstock_kernels.argtypes = [c_char_p]
        library.penstock_kernels.restype = POINTER(Kernels)
    except (OSError, AttributeError) as error:
        raise LibraryMissing(f"{path} cannot be loaded ({error})", BUILD_IT) from error
    _check_sources(library, path)
    return library


def _check_sources(library: ctypes.CDLL, path: Path) -> None:
    """Refuses a library that was built from other sources, if the sources are here: its types may differ from the ones
    mirrored in this file."""
    if not SOURCES.is_dir():
        return
    from penstock.kernels.cpu.build import digest

    tell = getattr(library, "penstock_sources", None)
    if tell is not None:
        tell.restype = c_char_p
    if tell is None or tell() != digest().encode():
        remedy = "run make native" if path == LIBRARY else f"build it again, or unset {VARIABLE}"
        raise LibraryMissing(f"{path} was built from other sources than those in csrc", remedy)


def find_kernels(level: str | None = None, path: Path | None = None) -> Kernels | None:
    """The function table of an instruction set, by default the best one; None if this machine cannot run it."""
    found = load_library(path).penstock_kernels(level.encode() if level else None)
    return found.contents if found else None
