"""Checks the files of a LoRA adapter in peft's layout before they are used, and reads its matrices. The adapter of a
linear W adds ``scale B A x`` to ``W x``: https://arxiv.org/abs/2106.09685."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.rope import row_order
from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.files.model_files import MAX_CONFIG_BYTES, open_model_file, read_model_file
from penstock.models.checkpoint.files.safetensors import NUMPY_DTYPES
from penstock.models.checkpoint.files.safetensors_header import TensorEntry, read_header
from penstock.models.checkpoint.info import FLOAT_DTYPES
from penstock.models.errors import ModelError

Floats = NDArray[np.float32]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linears of a layer that an adapter may change."""
MAX_ALPHA = 1e6
MAX_NUMBER = 65504.0
"""The largest number of float16, which slots may have. Numbers of useful adapters are below 100."""

_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.([0-9]{1,4})\."
    r"(self_attn\.[qkvo]_proj|(?:mlp|feed_forward)\.(?:gate|up|down)_proj)\.lora_([AB])\.weight"
)
_ABSENT = (
    "modules_to_save", "alpha_pattern", "layer_replication", "trainable_token_indices", "target_parameters",
    "alora_invocation_tokens", "use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora",
)  # fmt: skip
"""Fields of peft's config that change what is computed. They must be absent, null, false or empty. The same holds for
every field whose name ends in _config, except runtime_config: each describes a variant of LoRA."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that also change the base model's weights, which such an adapter needs."""
PIECE_BYTES = 1 << 20
_MAX_SHOWN = 80


class AdaptedLinear(NamedTuple):
    """A linear of the base model that an adapter may change."""

    layer: int
    module: str
    """One of MODULES."""


class _Pair(NamedTuple):
    a: TensorEntry
    """(rank, columns of the linear)."""
    b: TensorEntry
    """(rows of the linear, rank)."""
    scale: float


class _Version(NamedTuple):
    """What changes when a file is written or replaced."""

    inode: int
    size: int
    mtime_ns: int


class LoraMatrices(NamedTuple):
    """The matrices of one linear: ``B A x`` is added to its output."""

    a: Floats
    """(rank, columns)."""
    b: Floats
    """(rows, rank), multiplied by the adapter's scale. The rows are in the backend's order."""


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter whose files passed every check except that of its numbers, which ``matrices`` makes."""

    path: Path
    rank: int
    """The largest of its linears."""
    digest: bytes
    """A sha256 of both files."""
    version: _Version
    """The version of the weights' file that ``digest`` is about."""
    pairs: Mapping[AdaptedLinear, _Pair]
    spec: ModelSpec
    wait_turn: Callable[[], None]
    """Called before each piece of work."""

    def matrices(self) -> Iterator[tuple[AdaptedLinear, LoraMatrices]]:
        """Reads the matrices, one linear after the other. Raises ModelError for a number that a slot cannot hold, and
        if the file has changed since ``read_adapter``: then ``digest`` belongs to other numbers."""
        file = self.path / WEIGHTS
        with _open_weights(file) as stream:
            self._check_version(stream)
            for linear, pair in self.pairs.items():
                self.wait_turn()
                a, b = (_floats(stream, entry) for entry in (pair.a, pair.b))
                with np.errstate(over="ignore", invalid="ignore"):
                    b *= np.float32(pair.scale)
                    for part in self.spec.factors_of(f"{_name(linear)}.weight"):
                        b[part.rows] *= np.float32(part.factor)
                    if not all((np.abs(matrix) <= MAX_NUMBER).all() for matrix in (a, b)):
                        raise ModelError(
                            f"{file}: the matrices of {_name(linear)} have a number that is not finite or, with the "
                            f"scale, above {MAX_NUMBER:,.0f}: download the adapter again"
                        )
                order = row_order(self.spec.at(linear.layer), _name(linear))
                yield linear, LoraMatrices(a, b if order is None else np.ascontiguousarray(b[order]))
            self._check_version(stream)

    def _check_version(self, stream: BufferedReader) -> None:
        if _version(stream) != self.version:
            raise ModelError(f"{self.path / WEIGHTS}: changed while it was read: load the adapter again")


def adapted_linears(spec: ModelSpec) -> dict[AdaptedLinear, tuple[int, int]]:
    """Returns the linears of a model that an adapter may change, with their rows and columns."""
    found = {}
    shapes = dict(spec.tensors())
    for layer in range(spec.num_layers):
        for module in MODULES:
            linear = AdaptedLinear(layer, module)
            shape = shapes.get(f"{_name(linear)}.weight")
            if shape is not None and (module != "q_proj" or _unusual_queries(spec) is None):
                found[linear] = (shape[0], shape[1])
    return found


def _unusual_queries(spec: ModelSpec) -> str | None:
    """Returns the kind of attention if its ``q_proj`` is not an ordinary linear: with latents, queries may come from a
    latent too, and rows of a gate are between those of the queries. None if it is."""
    return "latent attention" if spec.latent is not None else "gated attention" if spec.gated_attention else None


def read_adapter(
    path: Path, spec: ModelSpec, max_rank: int, wait_turn: Callable[[], None] = lambda: None
) -> LoraAdapter:
    """Checks the directory of an adapter for a model. Calls ``wait_turn`` before each piece of work, of about a
    millisecond. Raises ModelError."""
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory: give the directory of an adapter, with {CONFIG} and {WEIGHTS}")
    content, config = _read_config(path / CONFIG)
    try:
        scale_of = _read_scale(config, max_rank)
    except ModelError as error:
        raise ModelError(f"{path / CONFIG}: {str(error).removeprefix('config.json: ')}") from error
    file = path / WEIGHTS
    with _open_weights(file) as stream:
        version = _version(stream)  # first, so that a later change is seen
        pairs = dict(_pairs(file, _read_entries(file), spec, max_rank, scale_of))
        weights = hashlib.sha256()
        while piece := stream.read(PIECE_BYTES):
            wait_turn()
            weights.update(piece)
    rank = max(pair.a.shape[0] for pair in pairs.values())
    digest = hashlib.sha256(hashlib.sha256(content).digest() + weights.digest()).digest()
    return LoraAdapter(path, rank, digest, version, pairs, spec, wait_turn)


def _read_config(file: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        content = read_model_file(file, MAX_CONFIG_BYTES)
        values = msgspec.json.decode(content)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}): give an adapter's directory") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: is not valid JSON: download the adapter again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file}: is not a JSON object: download the adapter again")
    return content, values


class _Scale(NamedTuple):
    """The factor of ``B A``: alpha / rank, or alpha / sqrt(rank) with rslora."""

    alpha: float
    is_rslora: bool
    rank: int | None
    """The rank of every linear; None: their ranks differ."""

    def of_rank(self, rank: int) -> float:
        return self.alpha / (rank**0.5 if self.is_rslora else rank)


def _read_scale(values: Mapping[str, Any], max_rank: int) -> _Scale:
    """Checks the config. Raises ModelError that names the field."""
    config = HfConfigReader(values)
    if config.text("peft_type", "LORA") != "LORA":
        raise config.wrong("peft_type", "must be LORA: other kinds of adapters are not supported")
    variants = (name for name in values if name.endswith("_config") and name != "runtime_config")
    for name in (*_ABSENT, *variants):
        if values.get(name):
            raise config.wrong(name, "must be absent: such adapters are not supported")
    if config.text("bias", "none") != "none":
        raise config.wrong("bias", "must be none: adapters with biases are not supported")
    if config.is_text("init_lora_weights") and config.text("init_lora_weights").startswith(_CHANGES_BASE):
        raise config.wrong("init_lora_weights", "means that the base's weights change too: convert it to a plain LoRA")
    if config.text("task_type", "CAUSAL_LM") not in ("CAUSAL_LM", "FEATURE_EXTRACTION"):
        raise config.wrong("task_type", "must be CAUSAL_LM: adapters for other tasks are not supported")
    rank = config.integer("r", 1, 1 << 20)
    if rank > max_rank:
        raise config.wrong("r", f"must be at most --max-lora-rank, {max_rank}")
    alpha = config.number("lora_alpha", -MAX_ALPHA, MAX_ALPHA)
    return _Scale(alpha, config.flag("use_rslora", False), rank if not config.part("rank_pattern").names() else None)


def _read_entries(file: Path) -> dict[str, TensorEntry]:
    entries = read_header(file)
    if not entries:
        raise ModelError(f"{file}: has no tensors: download the adapter again")
    return entries


def _pairs(
    file: Path, entries: Mapping[str, TensorEntry], spec: ModelSpec, max_rank: int, scale: _Scale
) -> Iterator[tuple[AdaptedLinear, _Pair]]:
    """Yields the pairs of matrices of the linears. Raises ModelError if they do not fit the model."""
    halves: dict[AdaptedLinear, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{file}: tensor {name[:_MAX_SHOWN]} is not supported: adapters may change {', '.join(MODULES)} of "
                "ordinary layers only"
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise ModelError(f"{file}: tensor {name} has the dtype {entry.dtype}: it must be a float")
        linear = AdaptedLinear(int(match[1]), match[2].rpartition(".")[2])
        if match[3] in halves.setdefault(linear, {}):
            raise ModelError(f"{file}: has two matrices lora_{match[3]} of {_name(linear)}: download the adapter again")
        halves[linear][match[3]] = entry
    shapes = adapted_linears(spec)
    for linear, half in halves.items():
        if linear.module == "q_proj" and (attention := _unusual_queries(spec)) is not None:
            raise ModelError(
                f"{file}: changes {_name(linear)}, and adapters for q_proj of {attention} are not supported: train it "
                "for other modules"
            )
        if linear not in shapes:
            raise ModelError(
                f"{file}: changes {_name(linear)}, which the model, {spec.architecture} with {spec.num_layers} layers, "
                "does not have: the adapter is for another base model"
            )
        if len(half) < 2:
            raise ModelError(f"{file}: has only one matrix of {_name(linear)}: download the adapter again")
        a, b, (rows, columns) = half["A"], half["B"], shapes[linear]
        rank = a.shape[0] if len(a.shape) == 2 else 0
        if (a.shape, b.shape) != ((rank, columns), (rows, rank)) or rank < 1:
            raise ModelError(
                f"{file}: the matrices of {_name(linear)} have the shapes {list(a.shape)} and {list(b.shape)}, and the "
                f"model calls for [r, {columns}] and [{rows}, r]: the adapter is for another base model"
            )
        if rank > max_rank:
            raise ModelError(f"{file}: the rank of {_name(linear)} is {rank}: it must be at most {max_rank}")
        if rank != (scale.rank or rank):
            raise ModelError(f"{file}: the rank of {_name(linear)} is {rank}, and r in {CONFIG} is {scale.rank}")
        yield linear, _Pair(a, b, scale.of_rank(rank))


def _name(linear: AdaptedLinear) -> str:
    part = "self_attn" if linear.module in MODULES[:4] else "mlp"
    return f"model.layers.{linear.layer}.{part}.{linear.module}"


def _open_weights(file: Path) -> BufferedReader:
    if not file.exists() and file.with_suffix(".bin").exists():
        raise ModelError(f"{file.with_suffix('.bin')}: pickled weights are never loaded: save it as {WEIGHTS}")
    try:
        return open(open_model_file(file), "rb")
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}): check the path and its rights") from error


def _version(stream: BufferedReader) -> _Version:
    status = os.fstat(stream.fileno())
    return _Version(status.st_ino, status.st_size, status.st_mtime_ns)


def _floats(stream: BufferedReader, entry: TensorEntry) -> Floats:
    """Returns a matrix as float32. The file is not mapped, since an adapter may be saved again while it is read: if a
    mapped file becomes shorter, reading its end kills the process."""
    try:
        stream.seek(entry.offset)
        content = stream.read(entry.num_bytes)
        array: NDArray[Any] = np.frombuffer(content, NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)
    except (OSError, ValueError) as error:
        raise ModelError(f"{entry.file}: became shorter since it was checked: load the adapter again") from error
    if entry.dtype == "BF16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):
        return np.array(array, dtype=np.float32)
