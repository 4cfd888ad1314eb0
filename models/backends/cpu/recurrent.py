"""The recurrent layers of a model for the CPU library, and the slots of their states. Imports no tensor library."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.kernels.cpu.bindings import LANES, address
from penstock.kernels.cpu.program import DecoderLayer, Memory, Program, Recurrent, RecurrentKind, StateRows
from penstock.models.architecture.recurrent import GatedDeltaNet, Mamba2, RecurrentMixer, ShortConvolution
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.cpu.weights import Packer
from penstock.models.batch.batch import Batch
from penstock.models.batch.row_states import Save, StateCommit
from penstock.models.batch.rows import Ids
from penstock.scheduler.plan import NO_SLOT

_VECTORS = {"dt_bias": "decay_biases", "D": "skips", "norm.weight": "norm"}
"""The library's names of a mixer's vectors."""


def state_floats(mixer: RecurrentMixer) -> int:
    """Returns the numbers of a layer's state in the library, which pads the columns of matrices."""
    count, rows, columns = mixer.matrices
    return mixer.channels * (mixer.taps - 1) + count * rows * (-(-columns // LANES) * LANES)


def slot_floats(spec: ModelSpec) -> int:
    """Returns the numbers of a slot, a multiple of a cache line."""
    total = sum(state_floats(mixer) for mixer in spec.recurrent if mixer is not None)
    return -(-total // LANES) * LANES


def add_recurrent(packer: Packer, spec: ModelSpec, index: int, mixer: RecurrentMixer, layer: DecoderLayer) -> None:
    """Packs a layer's recurrent mixer."""
    prefix, hidden = f"model.layers.{index}.", spec.hidden_size
    names = [prefix + name for name in mixer.inputs]
    convolution = prefix + mixer.convolution
    weights = packer.floats(f"{convolution}.weight", (mixer.channels, 1, mixer.taps))
    fields: dict[str, Any] = {
        "input": packer.linear(names, list(mixer.inputs.values()), hidden, mixer.biased),
        "output": packer.linear([prefix + mixer.output], [hidden], mixer.output_columns, mixer.biased),
        "channels": mixer.channels,
        "taps": mixer.taps,
        "weights": packer.keep(weights.reshape(mixer.channels, mixer.taps).T),
        "bias": packer.vector(f"{convolution}.bias", mixer.channels) if mixer.convolution_biased else None,
        "state": sum(state_floats(before) for before in spec.recurrent[:index] if before is not None),
    }
    match mixer:
        case ShortConvolution():
            fields |= {"kind": RecurrentKind.CONVOLUTION, "z": mixer.channels, "inputs": 2 * mixer.channels}
        case GatedDeltaNet():
            fields |= _delta_net_fields(packer, prefix, mixer)
        case Mamba2():
            fields |= _mamba2_fields(packer, prefix, mixer)
    layer.recurrent = Recurrent(**fields)


def _delta_net_fields(packer: Packer, prefix: str, net: GatedDeltaNet) -> dict[str, float | None]:
    heads = net.num_value_heads
    # Keys and queries of length 1 are their RMS norms by these factors; queries are divided by the length once more.
    scales = [packer.keep(np.full(net.key_size, net.key_size**-power, np.float32)) for power in (0.5, 1.0)]
    return {
        "kind": RecurrentKind.DELTA_NET, "key_heads": net.num_key_heads, "heads": heads, "key_size": net.key_size,
        "value_size": net.value_size, "norm_eps": net.eps, "keys": net.keys, "values": 2 * net.keys,
        "z": net.channels, "beta": net.channels + net.values, "decay": net.channels + net.values + heads,
        "key_scales": scales[0], "query_scales": scales[1], **_vectors(packer, prefix, net),
    }  # fmt: skip


def _mamba2_fields(packer: Packer, prefix: str, mamba: Mamba2) -> dict[str, float | None]:
    step = mamba.values + mamba.channels
    least, most = mamba.step_limits
    return {
        "kind": RecurrentKind.MAMBA2, "key_heads": mamba.num_groups, "heads": mamba.num_heads,
        "key_size": mamba.state_size, "value_size": mamba.head_size, "norm_eps": mamba.eps, "keys": mamba.values,
        "queries": mamba.values + mamba.keys, "inputs": mamba.values, "beta": step, "decay": step,
        "least_step": least, "most_step": most, **_vectors(packer, prefix, mamba),
    }  # fmt: skip


def _vectors(packer: Packer, prefix: str, mixer: GatedDeltaNet | Mamba2) -> dict[str, float | None]:
    """Returns the addresses of a mixer's vectors: biases and rates of decay, D and the norm if there are such."""
    found: dict[str, float | None] = {}
    for name, shape in mixer.vectors.items():
        if name.endswith(".A_log"):
            stored = packer.floats(prefix + name, shape)
            found["rates"] = packer.keep(stored if mixer.has_rates else -np.exp(stored))
        else:
            found[_VECTORS[name.partition(".")[2]]] = packer.vector(prefix + name, shape)
    return found


class CpuStates:
    """The slots of recurrent states. See ``RecurrentStates``."""

    def __init__(self, memory: Memory, slot_bytes: int, program: Program) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._program = program

    def begin(self, slot: int, source: int) -> None:
        to = self._memory.address + slot * self._slot_bytes
        if source == NO_SLOT:
            ctypes.memset(to, 0, self._slot_bytes)
        else:
            ctypes.memmove(to, self._memory.address + source * self._slot_bytes, self._slot_bytes)

    def commit(self, batch: Batch, commits: list[StateCommit]) -> None:
        sizes = (batch.ends - batch.starts).tolist()
        uncertain = [size - step.certain for size, step in zip(sizes, batch.states, strict=True)]
        firsts = np.cumsum([0, *uncertain])
        starts: Ids = np.array([firsts[commit.row] for commit in commits], dtype=np.int64)
        certain: Ids = np.array([commit.num_tokens for commit in commits], dtype=np.int64)
        rows = StepStates(
            [batch.states[commit.row].slot for commit in commits],
            starts,
            starts + certain,
            certain,
            [commit.saves for commit in commits],
        )
        self._program.commit(rows.rows)


class StepStates:
    """The rows whose states advance, for the library: what ``rows`` points to lives as long as this object."""

    def __init__(
        self, slots: Sequence[int], starts: Ids, ends: Ids, certain: Ids, saves: Sequence[Sequence[Save]]
    ) -> None:
        save_starts: Ids = np.cumsum([0, *map(len, saves)], dtype=np.int64)
        pairs: Ids = np.array([save for some in saves for save in some], dtype=np.int64)
        kept = (np.array(slots, dtype=np.int64), starts, ends, certain, save_starts, pairs)
        self._kept = tuple(np.ascontiguousarray(array) for array in kept)
        self.rows = StateRows(len(slots), *map(address, self._kept))

    @classmethod
    def of_batch(cls, batch: Batch) -> "StepStates":
        """Returns the states of all rows of a batch."""
        return cls(
            [step.slot for step in batch.states],
            batch.token_starts[:-1],
            batch.token_starts[1:],
            np.array([step.certain for step in batch.states], dtype=np.int64),
            [step.saves for step in batch.states],
        )
