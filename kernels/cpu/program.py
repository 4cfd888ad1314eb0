"""Mirrors the types in ``csrc/model/program.h``, a model as data and one step of it, and calls the library with
them."""

import ctypes
import logging
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import BUILD_IT, Kernels, KvLayout, LibraryMissing, Matrix, load_library

logger = logging.getLogger(__name__)

STAGES = (
    "embed", "norm", "qkv", "rope and KV", "attention", "output", "experts", "gate and up", "down", "head", "sample",
)  # fmt: skip


class ElementType(IntEnum):
    """The element type of a tensor on disk."""

    F32 = 0
    BF16 = 1
    F16 = 2
    F64 = 3


class QkNormKind(IntEnum):
    """How queries and keys are normed: not at all, each head by itself, all heads together, or each head by itself with
    a weight of its own."""

    NONE = 0
    HEAD = 1
    ALL = 2
    EACH_HEAD = 3


class Norm(Structure):
    """A norm. Without a weight, there is none."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class PackedLinear(Structure):
    """One matrix product, or several side by side."""

    _fields_ = (("num_parts", c_int32), ("parts", Matrix * 3))


class LoraPair(Structure):
    """A LoRA adapter of one linear."""

    _fields_ = (("a", Matrix), ("b", Matrix))


class Rope(Structure):
    """The frequencies, the scale and the number of pairs of a rotary embedding."""

    _fields_ = (("frequencies", c_void_p), ("scale", c_float), ("half", c_int32))


class PackedMlp(Structure):
    """An MLP, or one expert of a mixture."""

    _fields_ = (("gate_up", PackedLinear), ("down", PackedLinear))


class Latent(Structure):
    """What latent attention has besides the layer's first linears and its output. Without a rank, there is none."""

    _fields_ = (
        ("rank", c_int32), ("rotary", c_int32), ("unrotated", c_int32), ("value_size", c_int32), ("norm_eps", c_float),
        ("norm", c_void_p), ("query_norm", c_void_p), ("query", PackedLinear), ("absorb", c_void_p),
        ("expand", c_void_p),
    )  # fmt: skip


class RecurrentKind(IntEnum):
    """The recurrent mixer of a layer."""

    NONE = 0
    CONVOLUTION = 1
    DELTA_NET = 2
    MAMBA2 = 3


class Recurrent(Structure):
    """A recurrent mixer."""

    _fields_ = (
        ("input", PackedLinear), ("output", PackedLinear), ("kind", c_int32), ("channels", c_int32),
        ("taps", c_int32), ("key_heads", c_int32), ("heads", c_int32),
        ("key_size", c_int32), ("value_size", c_int32), ("inputs", c_int32), ("z", c_int32), ("beta", c_int32),
        ("decay", c_int32), ("queries", c_int32), ("keys", c_int32), ("values", c_int32), ("norm_eps", c_float),
        ("least_step", c_float), ("most_step", c_float), ("weights", c_void_p), ("bias", c_void_p),
        ("key_scales", c_void_p), ("query_scales", c_void_p), ("decay_biases", c_void_p), ("rates", c_void_p),
        ("skips", c_void_p), ("norm", c_void_p), ("state", c_int64),
    )  # fmt: skip


class DecoderLayer(Structure):
    """One layer of a model."""

    _fields_ = (
        ("attention_norm", Norm), ("attention_post_norm", Norm), ("mlp_norm", Norm), ("mlp_post_norm", Norm),
        ("hidden_norm", Norm), ("query_norm", Norm), ("key_norm", Norm), ("value_norm", Norm), ("sinks", c_void_p),
        ("window", c_int32), ("rope", c_int32), ("scales_queries", c_int32), ("has_kv", c_int32),
        ("values_are_keys", c_int32), ("intermediate_size", c_int32), ("kv_group", c_int32), ("kv", KvLayout),
        ("kv_offset", c_int64),
        ("qkv", PackedLinear), ("output", PackedLinear), ("recurrent", Recurrent), ("mlp", PackedMlp),
        ("mlp_inner_norm", Norm),
        ("router_norm", Norm), ("expert_norm", Norm), ("expert_post_norm", Norm), ("router", PackedLinear),
        ("experts", c_void_p), ("selection_bias", c_void_p), ("expert_scales", c_void_p), ("shared", PackedMlp),
        ("shared_gate", PackedLinear), ("input_gate", PackedLinear), ("input_projection", PackedLinear),
        ("input_norm", Norm), ("scalar", c_float), ("latent", Latent),
    )  # fmt: skip


class DecoderModel(Structure):
    """A model as data."""

    _fields_ = (
        ("kernels", POINTER(Kernels)), ("vocab_size", c_int32), ("num_logits", c_int32), ("hidden_size", c_int32),
        ("intermediate_size", c_int32), ("num_layers", c_int32), ("num_heads", c_int32), ("num_ropes", c_int32),
        ("num_experts", c_int32),
        ("experts_per_token", c_int32), ("expert_size", c_int32), ("normalise_experts", c_int32),
        ("shared_size", c_int32), ("scores_are_sigmoids", c_int32), ("num_groups", c_int32),
        ("groups_per_token", c_int32), ("expert_activation", c_int32), ("qk_norm", c_int32),
        ("qk_norm_is_last", c_int32), ("activation", c_int32), ("gated_attention", c_int32), ("gated_mlp", c_int32),
        ("layer_norms", c_int32),
        ("parallel_layers", c_int32), ("chunked_windows", c_int32), ("scales_expert_inputs", c_int32),
        ("block_size", c_int32), ("query_scaling_positions", c_int32), ("query_scaling_shift", c_int32),
        ("query_scaling_beta", c_float), ("expert_scale", c_float), ("norm_eps", c_float),
        ("embedding_scale", c_float), ("attention_scale", c_float), ("attention_soft_cap", c_float),
        ("logit_scale", c_float), ("logit_soft_cap", c_float),
        ("gate_alpha", c_float), ("gate_limit", c_float),
        ("embedding_format", c_int32), ("embedding", c_void_p), ("packed_embedding", Matrix),
        ("position_table", c_void_p), ("position_offset", c_int32), ("input_size", c_int32),
        ("input_vocab_size", c_int32), ("input_embedding_scale", c_float), ("input_embedding", c_void_p),
        ("input_linear", PackedLinear), ("input_linear_norm", Norm),
        ("fc", PackedLinear), ("embedding_norm", Norm), ("hidden_norm", Norm), ("continues_after_norm", c_int32),
        ("head", PackedLinear), ("norm", Norm),
        ("layers", c_void_p), ("ropes", c_void_p), ("pages", c_void_p), ("page_bytes", c_int64),
        ("adapters", c_void_p), ("adapter_format", c_int32), ("adapter_rank", c_int32),
        ("states", c_void_p), ("state_floats", c_int64),
    )  # fmt: skip


class StateRows(Structure):
    """The rows whose recurrent states advance."""

    _fields_ = (
        ("num_rows", c_int32), ("slots", c_void_p), ("starts", c_void_p), ("ends", c_void_p), ("certain", c_void_p),
        ("save_starts", c_void_p), ("saves", c_void_p),
    )  # fmt: skip


class Step(Structure):
    """One step: its rows and tokens, and the outputs that are requested."""

    _fields_ = (
        ("num_tokens", c_int32), ("num_rows", c_int32), ("num_sampled", c_int32), ("num_scored", c_int32),
        ("token_ids", c_void_p), ("starts", c_void_p), ("ends", c_void_p), ("token_starts", c_void_p),
        ("tables", c_void_p), ("table_stride", c_int64), ("window_tables", c_void_p), ("num_window_groups", c_int64),
        ("window", c_int64),
        ("sampled", c_void_p), ("sampling", c_void_p),
        ("tokens", c_void_p), ("room", c_int64), ("top_ids", c_void_p), ("tops", c_void_p), ("scored", c_void_p),
        ("targets", c_void_p), ("num_tops", c_void_p), ("scored_room", c_int64), ("chosen", c_void_p),
        ("scored_top_ids", c_void_p), ("scored_tops", c_void_p), ("num_vectors", c_int32), ("num_pooled", c_int32),
        ("pooled", c_void_p), ("pooled_starts", c_void_p), ("vectors", c_void_p), ("num_features", c_int32),
        ("feature_layers", c_void_p), ("features", c_void_p), ("features_in", c_void_p), ("hidden", c_void_p),
        ("hidden_out", c_void_p), ("adapters", c_void_p), ("states", StateRows),
    )  # fmt: skip


class Placement(Structure):
    """The placement of a pool's threads; see ``csrc/core/threads.h``."""

    _fields_ = (("num", c_int32), ("nodes", c_void_p), ("cpu_starts", c_void_p), ("cpus", c_void_p))
    kept: object


class Memory:
    """Zeroed memory that the library maps, in huge pages where the system has them. The system commits pages on first
    write. The memory is unmapped with this object, which must outlive every use of the address."""

    def __init__(self, library: ctypes.CDLL, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address: int = library.penstock_map(num_bytes) or 0
        if not self.address:
            raise MemoryError(f"{num_bytes} bytes")
        self._c = library
        _with(self, library.penstock_unmap, self.address, num_bytes)

    def populate(self, begin: int, num_bytes: int) -> None:
        """Has the system commit ``num_bytes`` from ``begin`` on now; other threads may read and write there meanwhile.
        One call, which releases the GIL."""
        self._c.penstock_populate(self.address + begin, num_bytes)


class Library:
    """The library's functions for models, with their types. Calls release the GIL."""

    def __init__(
        self,
        num_threads: int,
        path: Path | None = None,
        *,
        cpus: Sequence[Sequence[int]] = (),
        nodes: Sequence[int] = (),
    ) -> None:
        """``cpus``: the logical CPUs on which each thread may run; empty: all threads run everywhere. ``nodes``: the
        NUMA node of each thread, in ascending order; empty: memory is not placed. Raises LibraryMissing."""
        assert len(cpus) in (0, num_threads), "CPUs for each thread, or for none"
        assert len(nodes) in (0, num_threads), "a node for each thread, or for none"
        assert list(nodes) == sorted(nodes), "the threads of a node are side by side"
        self._c = typed_library(path)
        self._placement = _placement(num_threads, cpus, nodes)
        self._nodes = sorted(set(nodes))
        self.num_threads = num_threads
        self._threads: int = self._c.penstock_threads(byref(self._placement))
        self._end = _with(self, self._c.penstock_threads_end, self._threads)

    def memory(self, num_bytes: int) -> Memory:
        """Maps memory whose pages the system takes from the node of the thread that writes them first. Raises
        MemoryError."""
        return Memory(self._c, num_bytes)

    def shared_memory(self, num_bytes: int) -> Memory:
        """Maps memory that any thread may read. With threads on several NUMA nodes, its pages alternate between
        these. Raises MemoryError."""
        memory = self.memory(num_bytes)
        if len(self._nodes) > 1:
            nodes = (c_int32 * len(self._nodes))(*self._nodes)
            if not self._c.penstock_interleave(memory.address, num_bytes, nodes, len(nodes)):
                logger.warning("the system does not let this process spread memory over NUMA nodes (mbind)")
        return memory

    def pack(
        self, kernels: Kernels, matrix: Matrix, rows: NDArray[np.uint64], source: ElementType, stride: int
    ) -> tuple[float, float]:
        """Packs the rows at the given addresses, 0 for a missing row, with ``stride`` bytes from column to column.
        Returns the sum of the squared errors and the sum of the squared weights; both are 0 if nothing is quantised."""
        errors = np.zeros((self.num_threads, 2))
        self._c.penstock_pack(
            self._threads, byref(kernels), byref(matrix), rows.ctypes.data, source, stride, errors.ctypes.data
        )
        return float(errors[:, 0].sum()), float(errors[:, 1].sum())

    def pack_codes(
        self,
        kernels: Kernels,
        matrix: Matrix,
        codes: NDArray[np.uint64],
        scales: NDArray[np.uint64],
        zeros: NDArray[np.uint64],
    ) -> None:
        """Packs the codes of a quantised checkpoint at the given addresses, 0 for a missing row."""
        self._c.penstock_pack_codes(
            self._threads, byref(kernels), byref(matrix), codes.ctypes.data, scales.ctypes.data, zeros.ctypes.data
        )

    def loaded(self) -> None:
        """Ends the threads that pack weights. Called when everything is packed."""
        self._end()

    def program(self, model: DecoderModel) -> "Program":
        return Program(self._c, self._c.penstock_program(byref(model), byref(self._placement)))


class Program:
    """Runs steps of one model, one at a time. Its threads end with this object."""

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._c = library
        self._handle = handle
        _with(self, library.penstock_program_end, handle)

    def run(self, step: Step, num_threads: int) -> None:
        self._c.penstock_step(self._handle, byref(step), num_threads)

    def start_step(self, step: Step, num_threads: int) -> None:
        """Runs the step except for the choice of tokens. The step and everything it points to must stay alive until
        ``finish`` or the next step; the sampling parameters may change until then."""
        self._c.penstock_step_begin(self._handle, byref(step), num_threads)

    def finish(self) -> None:
        """Chooses the tokens of the step that ``start_step`` ran."""
        self._c.penstock_step_finish(self._handle)

    def commit(self, rows: StateRows) -> None:
        """Advances recurrent states by tokens that the last step computed from copies of them."""
        self._c.penstock_commit(self._handle, byref(rows))

    def seconds(self) -> dict[str, float]:
        """The seconds spent in each stage so far."""
        seconds = np.zeros(len(STAGES))
        count = self._c.penstock_stages(self._handle, seconds.ctypes.data)
        assert count == len(STAGES), "csrc/model/program.h has other stages"
        return dict(zip(STAGES, seconds.tolist(), strict=True))


def _placement(num_threads: int, cpus: Sequence[Sequence[int]], nodes: Sequence[int]) -> Placement:
    """Returns the library's description; what it points to lives as long as it."""
    starts = np.cumsum([0, *map(len, cpus)], dtype=np.int32)
    numbers = np.array([cpu for some in cpus for cpu in some], dtype=np.int32)
    node_of = np.array(nodes, dtype=np.int32)
    placement = Placement(
        num_threads,
        node_of.ctypes.data if nodes else None,
        starts.ctypes.data if cpus else None,
        numbers.ctypes.data if cpus else None,
    )
    placement.kept = (starts, numbers, node_of)
    return placement


def _with(owner: object, end: Callable[..., None], *arguments: int) -> Callable[[], None]:
    """Arranges for one call of ``end``: when the owner is collected, or when the returned function is called. Not
    called at process exit."""
    finalizer = weakref.finalize(owner, end, *arguments)
    finalizer.atexit = False
    return finalizer


def typed_library(path: Path | None = None) -> ctypes.CDLL:
    """Loads the library and declares its functions' types. Raises LibraryMissing."""
    library = load_library(path)
    address, integer, long = c_void_p, c_int32, c_int64
    signatures: dict[str, tuple[object, list[object]]] = {
        "penstock_map": (address, [long]),
        "penstock_unmap": (None, [address, long]),
        "penstock_populate": (None, [address, long]),
        "penstock_interleave": (integer, [address, long, address, integer]),
        "penstock_threads": (address, [POINTER(Placement)]),
        "penstock_threads_end": (None, [address]),
        "penstock_pack": (None, [address, POINTER(Kernels), POINTER(Matrix), address, integer, long, address]),
        "penstock_pack_codes": (None, [address, POINTER(Kernels), POINTER(Matrix), address, address, address]),
        "penstock_program": (address, [POINTER(DecoderModel), POINTER(Placement)]),
        "penstock_program_end": (None, [address]),
        "penstock_step": (None, [address, POINTER(Step), integer]),
        "penstock_step_begin": (None, [address, POINTER(Step), integer]),
        "penstock_step_finish": (None, [address]),
        "penstock_commit": (None, [address, POINTER(StateRows)]),
        "penstock_stages": (integer, [address, address]),
    }
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise LibraryMissing("the CPU library is older than this code", BUILD_IT) from error
        function.restype, function.argtypes = result, arguments
    return library
