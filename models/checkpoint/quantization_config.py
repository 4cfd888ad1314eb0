"""Reads a checkpoint's ``quantization_config``, of GPTQ, AWQ, compressed-tensors, fp8 or MXFP4, into a typed
description."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.checkpoint.module_patterns import MAX_CHARS, ModulePatterns
from penstock.models.errors import ModelError

CONFIG_FIELD = "quantization_config"

GROUP_STEP = 32
"""The number of columns in a group is a multiple of this."""
MAX_GROUP = 1 << 20
MX_GROUP = 32
"""The number of columns in a group of MXFP4."""

AT_LOAD = ("int8", "int4", "fp8")
"""What a float checkpoint can be quantised to. fp8 needs the CUDA backend, and is a checkpoint's method too."""

ANOTHER = "use another quantised checkpoint, or the unquantised one with --quantization int8 or int4"


class QuantLayout(Enum):
    """How a quantised matrix is stored."""

    GPTQ = auto()
    """Four or eight bits, packed along the columns; zero points are stored minus one."""
    GPTQ_V2 = auto()
    """The same, with zero points as they are."""
    AWQ = auto()
    """Four bits, packed along the rows, interleaved."""
    PACKED = auto()
    """compressed-tensors' four bits, packed along the columns."""
    INT8 = auto()
    """compressed-tensors' signed bytes; activations are quantised at run time."""
    FP8 = auto()
    """float8_e4m3fn, from compressed-tensors or the method fp8."""
    Q4_0 = auto()
    """GGUF's blocks of 32 columns: a scale, then four-bit codes."""
    MXFP4 = auto()
    """Four-bit floats, packed along the columns, with a power of two for each group: gpt-oss's experts, and
    compressed-tensors."""
    NVFP4 = auto()
    """The same with groups of 16, whose scales are float8_e4m3fn, and one more scale for the matrix."""


@dataclass(frozen=True)
class QuantScheme:
    """How the weights of some linears are quantised: ``W = (code - zero) * scale``."""

    layout: QuantLayout
    group: int
    """The number of columns that share a scale and a zero point; 0: all columns of a row."""
    has_zeros: bool = False
    """Whether zero points are stored. If not, they are the middle of the codes."""
    is_ordered: bool = False
    """Whether a stored index assigns each column to a group."""
    rows: int = 1
    """The number of rows that share scales, for FP8; 0: all."""
    is_wide: bool = False
    """Whether codes of GPTQ have eight bits."""
    narrows_inputs: bool = False
    """Whether inputs are quantised too, at run time: per token, and per group of columns if weights have groups."""

    @property
    def bits(self) -> int:
        return 8 if self.is_wide or self.layout in (QuantLayout.INT8, QuantLayout.FP8) else 4

    @property
    def is_float(self) -> bool:
        return self.layout in (QuantLayout.FP8, QuantLayout.MXFP4, QuantLayout.NVFP4)

    def num_row_groups(self, rows: int) -> int:
        """The number of groups in a column; the last one may be short."""
        return -(-rows // self.rows) if self.rows else 1

    def num_groups(self, columns: int) -> int:
        """The number of groups in a row; the last one may be short."""
        return -(-columns // self.group) if self.group else 1


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a checkpoint."""

    method: str
    """gptq, awq, compressed-tensors, fp8, mxfp4 or gguf."""
    schemes: tuple[tuple[ModulePatterns, QuantScheme], ...]
    """Each linear has the scheme whose patterns match it most precisely."""
    ignored: ModulePatterns
    """Linears that stay float."""

    def scheme_of(self, module: str) -> QuantScheme | None:
        """The scheme of the linear of this name; None if it stays float, though it may only be missing in the list."""
        if module in self.ignored:
            return None
        # If two match equally precisely, the first one wins.
        by_precision = {names.precision(module): scheme for names, scheme in reversed(self.schemes)}
        return next((by_precision[at] for at in range(3) if at in by_precision), None)


def quantization_from_config(config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantisation in a config.json, or None if there is none. Raises ModelError, naming the field."""
    fields = HfConfigReader(config)
    if CONFIG_FIELD not in fields:
        return None
    part = fields.part(CONFIG_FIELD)
    method = part.text("quant_method")
    _require(method in METHODS, part, "quant_method", f"must be one of {', '.join(METHODS)}")
    return METHODS[method](part)


def choose_quantization(requested: str, stored: Quantization | None) -> str:
    """The quantisation that a model runs with: ``none``, one of AT_LOAD, or the checkpoint's own method. ``requested``
    is the value of --quantization. Raises ModelError if it contradicts the checkpoint."""
    known = tuple(dict.fromkeys(("none", *AT_LOAD, *METHODS)))
    if requested not in known:
        raise ModelError(f"--quantization {requested}: must be one of {', '.join(known)}")
    if stored is None:
        if requested in METHODS and requested not in AT_LOAD:
            raise ModelError(
                f"--quantization {requested}: the checkpoint is not quantised: leave the flag out, or give int8 or int4"
            )
        return requested
    if requested in AT_LOAD and requested != stored.method:
        raise ModelError(
            f"--quantization {requested}: the checkpoint is quantised already, by {stored.method}: leave the flag out, "
            "or use the unquantised checkpoint"
        )
    if requested not in ("none", stored.method):
        raise ModelError(
            f"--quantization {requested}: the checkpoint is quantised by {stored.method}, as config.json states: leave "
            f"the flag out, or give {stored.method}"
        )
    return stored.method


def _gptq(fields: HfConfigReader) -> Quantization:
    """Reads AutoGPTQ's and GPTQModel's config. ``format`` is the later name of ``checkpoint_format``."""
    bits = fields.integer("bits", 1, 64)
    _require(bits in (4, 8), fields, "bits", "must be 4 or 8")
    name = "checkpoint_format" if "checkpoint_format" in fields else "format"
    layouts = {"gptq": QuantLayout.GPTQ, "gptq_v2": QuantLayout.GPTQ_V2}
    layout = fields.text(name, "gptq")
    _require(layout in layouts, fields, name, "must be gptq or gptq_v2")
    _require(fields.text("pack_dtype", "int32") == "int32", fields, "pack_dtype", "must be int32")
    # Patterns with a minus name modules that stay float; all others change bits or groups of some modules.
    are_skipped = all(pattern.startswith("-:") for pattern in fields.part("dynamic").names())
    _require(are_skipped, fields, "dynamic", "must not quantise some modules otherwise than the rest")
    fields.flag("sym", True)  # zero points are stored either way
    is_ordered = fields.flag("desc_act", False)
    scheme = QuantScheme(layouts[layout], _group(fields), has_zeros=True, is_ordered=is_ordered, is_wide=bits == 8)
    return Quantization("gptq", ((ModulePatterns(("Linear",)), scheme),), _not_converted(fields))


def _awq(fields: HfConfigReader) -> Quantization:
    """Reads AutoAWQ's config. ``version`` is also called ``format``."""
    _check_bits(fields, "bits", 4)
    name = "version" if "version" in fields else "format"
    _require(fields.text(name, "gemm").lower() == "gemm", fields, name, "must be gemm")
    fields.flag("zero_point", True)  # zero points are stored either way
    scheme = QuantScheme(QuantLayout.AWQ, _group(fields), has_zeros=True)
    return Quantization("awq", ((ModulePatterns(("Linear",)), scheme),), _not_converted(fields))


def _fp8(fields: HfConfigReader) -> Quantization:
    """Reads the configs of DeepSeek, with blocks, and AutoFP8. Static activation scales are ignored."""
    for name, right in (("fmt", "e4m3"), ("scale_fmt", "float")):
        _require(fields.text(name, right) == right, fields, name, f"must be {right}")
    activations = fields.text("activation_scheme", "dynamic")
    _require(activations in ("dynamic", "static"), fields, "activation_scheme", "must be dynamic or static")
    rows, columns = _block(fields, "weight_block_size") if "weight_block_size" in fields else (0, 0)
    scheme = QuantScheme(QuantLayout.FP8, columns, rows=rows, narrows_inputs=True)
    # The field's name before transformers supported the method.
    skipped = "ignored_layers" if "ignored_layers" in fields else "modules_to_not_convert"
    return Quantization("fp8", ((ModulePatterns(("Linear",)), scheme),), _not_converted(fields, skipped))


def _mxfp4(fields: HfConfigReader) -> Quantization:
    """Reads gpt-oss's config. Only experts are quantised."""
    scheme = QuantScheme(QuantLayout.MXFP4, MX_GROUP)
    return Quantization("mxfp4", ((ModulePatterns(("re:.*\\.experts\\.",)), scheme),), _not_converted(fields))


def _compressed_tensors(fields: HfConfigReader) -> Quantization:
    """Reads llm-compressor's config. ``quantization_status`` is ignored: published checkpoints have any stage."""
    for name in ("moe_sparsity_config", "transform_config"):
        _require(not fields.part(name).names(), fields, name, "must be null")
    sparsity = fields.part("sparsity_config").text("format", "dense")
    _require(sparsity == "dense", fields, "sparsity_config", "must be null or dense")
    groups = fields.part("config_groups")
    schemes = []
    for name in groups.names():
        group = groups.part(name)
        storage = group if "format" in group else fields
        schemes.append((_names(group, "targets"), _group_scheme(group, storage)))
    if not schemes:
        raise fields.wrong("config_groups", "must hold at least one group: download the model's config.json again")
    ignored = _names(fields, "ignore") if "ignore" in fields else ModulePatterns(())
    return Quantization("compressed-tensors", tuple(schemes), ignored)


def _group_scheme(group: HfConfigReader, storage: HfConfigReader) -> QuantScheme:
    """The scheme of one of ``config_groups``; ``storage`` has its ``format``."""
    weights = group.part("weights")
    kind = weights.text("type", "int")
    _require(kind in FORMATS, weights, "type", f"must be {' or '.join(FORMATS)}")
    _require(not weights.flag("dynamic", False), weights, "dynamic", "must be false")
    _require("output_activations" not in group, group, "output_activations", "must be null")
    formats, stored = FORMATS[kind], storage.text("format")
    _require(stored in formats, storage, "format", f"must be {' or '.join(formats)} where weights are of type {kind}")
    return formats[stored](group, weights)


def _packed_scheme(group: HfConfigReader, weights: HfConfigReader) -> QuantScheme:
    _check_bits(weights, "num_bits", 4)
    _require("input_activations" not in group, group, "input_activations", "must be null for weights of 4 bits")
    size = _group(weights, default=-1)
    strategy = weights.text("strategy", _default_strategy(weights))
    fits = strategy == ("group" if size else "channel")
    _require(fits, weights, "strategy", "must be group with a group_size, or channel without one")
    return QuantScheme(QuantLayout.PACKED, size, not weights.flag("symmetric", True), _is_ordered(weights))


def _default_strategy(weights: HfConfigReader) -> str:
    """The meaning of an absent ``strategy``."""
    if "group_size" not in weights:
        return "tensor"
    return "group" if _group(weights) else "channel"


def _is_ordered(weights: HfConfigReader) -> bool:
    """Whether columns have an index of groups. The other kinds of ``actorder`` matter only during calibration."""
    if weights.is_bool("actorder"):
        return weights.flag("actorder", False)
    order = weights.text("actorder", "weight").lower()
    is_known = order in ("weight", "static", "group", "dynamic")
    _require(is_known, weights, "actorder", "must be null, weight, static, group or dynamic")
    return order in ("group", "dynamic")


def _int8_scheme(group: HfConfigReader, weights: HfConfigReader) -> QuantScheme:
    _check_bits(weights, "num_bits", 8)
    strategy = weights.text("strategy", _default_strategy(weights))
    _require(strategy == "channel", weights, "strategy", "must be channel for weights of 8 bits")
    _require(weights.flag("symmetric", True), weights, "symmetric", "must be true for weights of 8 bits")
    _require("input_activations" in group, group, "input_activations", "must be there for weights of 8 bits")
    activations = group.part("input_activations")
    _check_bits(activations, "num_bits", 8)
    _require(activations.text("type", "int") == "int", activations, "type", "must be int")
    _require(activations.flag("dynamic", False), activations, "dynamic", "must be true")
    _require(activations.text("strategy", "tensor") == "token", activations, "strategy", "must be token")
    _require(activations.flag("symmetric", True), activations, "symmetric", "must be true for activations")
    return QuantScheme(QuantLayout.INT8, 0, narrows_inputs=True)


def _fp8_scheme(group: HfConfigReader, weights: HfConfigReader) -> QuantScheme:
    _check_bits(weights, "num_bits", 8)
    _require(weights.flag("symmetric", True), weights, "symmetric", "must be true for weights of 8 bits")
    strategy = weights.text("strategy", _default_strategy(weights))
    is_known = strategy in ("tensor", "channel", "block")
    _require(is_known, weights, "strategy", "must be tensor, channel or block for floats of 8 bits")
    rows, columns = (1, 0) if strategy == "channel" else (0, 0)
    if strategy == "block":
        rows, columns = _block(weights, "block_structure")
    if "input_activations" in group:
        # The number of scales, one or one per token, and whether they are in the file do not matter: activations get
        # the scales that fit them best.
        activations = group.part("input_activations")
        _check_bits(activations, "num_bits", 8)
        is_float = activations.text("type", "int") == "float"
        _require(is_float, activations, "type", "must be float as that of the weights is")
        _require(activations.flag("symmetric", True), activations, "symmetric", "must be true for activations")
    return QuantScheme(QuantLayout.FP8, columns, rows=rows, narrows_inputs="input_activations" in group)


def _fp4_scheme(
    layout: QuantLayout, strategy: str, size: int, _: HfConfigReader, weights: HfConfigReader
) -> QuantScheme:
    """Inputs that the checkpoint quantises too stay as they are."""
    _check_bits(weights, "num_bits", 4)
    fits = weights.text("strategy", "") == strategy and weights.integer("group_size", 1, MAX_GROUP) == size
    _require(fits, weights, "strategy", f"must be {strategy} with a group_size of {size} in this format")
    return QuantScheme(layout, size)


FORMATS: dict[str, dict[str, Callable[[HfConfigReader, HfConfigReader], QuantScheme]]] = {
    "int": {"pack-quantized": _packed_scheme, "int-quantized": _int8_scheme, "naive-quantized": _int8_scheme},
    "float": {
        "float-quantized": _fp8_scheme,
        "naive-quantized": _fp8_scheme,
        "mxfp4-pack-quantized": partial(_fp4_scheme, QuantLayout.MXFP4, "group", MX_GROUP),
        "nvfp4-pack-quantized": partial(_fp4_scheme, QuantLayout.NVFP4, "tensor_group", 16),
    },
}
"""The reader of a group's scheme, for each type of weights and each of its formats in compressed-tensors."""


def _require(holds: bool, fields: HfConfigReader, name: str, rule: str) -> None:
    if not holds:
        raise fields.wrong(name, f"{rule}: {ANOTHER}")


def _check_bits(fields: HfConfigReader, name: str, bits: int) -> None:
    _require(fields.integer(name, 1, 64) == bits, fields, name, f"must be {bits}")


def _group(fields: HfConfigReader, default: int | None = None) -> int:
    """The value of ``group_size``, with 0 for -1: all columns of a row share a scale."""
    size = fields.integer("group_size", -1, MAX_GROUP, default)
    fits = size == -1 or (size > 0 and size % GROUP_STEP == 0)
    _require(fits, fields, "group_size", f"must be -1 or a multiple of {GROUP_STEP}")
    return max(size, 0)


def _block(fields: HfConfigReader, name: str) -> tuple[int, int]:
    """Returns how many rows and how many columns share a scale."""
    sizes = fields.integers(name, 1, MAX_GROUP)
    fits = len(sizes) == 2 and sizes[1] % GROUP_STEP == 0
    _require(fits, fields, name, f"must be rows and columns, the latter a multiple of {GROUP_STEP}")
    return sizes[0], sizes[1]


def _not_converted(fields: HfConfigReader, name: str = "modules_to_not_convert") -> ModulePatterns:
    """Returns patterns of modules, each given as part of a dotted name."""
    parts = fields.texts(name) if name in fields else []
    if any(len(part) > MAX_CHARS // 4 for part in parts):
        raise fields.wrong(name, f"must name modules in at most {MAX_CHARS // 4} characters each")
    return ModulePatterns(f"re:(.*\\.)?{re.escape(part.strip('.'))}(\\.|$)" for part in parts)


def _names(fields: HfConfigReader, name: str) -> ModulePatterns:
    try:
        return ModulePatterns(fields.texts(name))
    except re.error as error:
        raise fields.wrong(name, f"has a regular expression that cannot be read ({error}): correct it") from error


METHODS: dict[str, Callable[[HfConfigReader], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
"""The reader of each ``quant_method``."""
