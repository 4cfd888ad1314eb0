"""Reads ``quantization_config`` of compressed-tensors, as llm-compressor writes it."""

from collections.abc import Callable
from functools import partial

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.checkpoint.quantization.fields import (
    MAX_GROUP,
    check_bits,
    read_block,
    read_group_size,
    read_patterns,
    require,
)
from penstock.models.checkpoint.quantization.module_patterns import ModulePatterns
from penstock.models.checkpoint.quantization.scheme import (
    MX_GROUP,
    NV_GROUP,
    Quantization,
    QuantLayout,
    QuantScheme,
)


def read_compressed_tensors(fields: HfConfigReader) -> Quantization:
    """Reads llm-compressor's config. ``quantization_status`` is ignored: published checkpoints have any stage."""
    for name in ("moe_sparsity_config", "transform_config"):
        require(not fields.part(name).names(), fields, name, "must be null")
    sparsity = fields.part("sparsity_config").text("format", "dense")
    require(sparsity == "dense", fields, "sparsity_config", "must be null or dense")
    groups = fields.part("config_groups")
    schemes = []
    for name in groups.names():
        group = groups.part(name)
        storage = group if "format" in group else fields
        schemes.append((read_patterns(group, "targets"), _group_scheme(group, storage)))
    if not schemes:
        raise fields.wrong("config_groups", "must hold at least one group: download the model's config.json again")
    ignored = read_patterns(fields, "ignore") if "ignore" in fields else ModulePatterns(())
    return Quantization("compressed-tensors", tuple(schemes), ignored)


def _group_scheme(group: HfConfigReader, storage: HfConfigReader) -> QuantScheme:
    """The scheme of one of ``config_groups``; ``storage`` has its ``format``."""
    weights = group.part("weights")
    kind = weights.text("type", "int")
    require(kind in FORMATS, weights, "type", f"must be {' or '.join(FORMATS)}")
    require(not weights.flag("dynamic", False), weights, "dynamic", "must be false")
    require("output_activations" not in group, group, "output_activations", "must be null")
    formats, stored = FORMATS[kind], storage.text("format")
    require(stored in formats, storage, "format", f"must be {' or '.join(formats)} where weights are of type {kind}")
    return formats[stored](group, weights)


def _packed_scheme(group: HfConfigReader, weights: HfConfigReader) -> QuantScheme:
    check_bits(weights, "num_bits", 4)
    require("input_activations" not in group, group, "input_activations", "must be null for weights of 4 bits")
    size = read_group_size(weights, default=-1)
    strategy = weights.text("strategy", _default_strategy(weights))
    fits = strategy == ("group" if size else "channel")
    require(fits, weights, "strategy", "must be group with a group_size, or channel without one")
    return QuantScheme(QuantLayout.PACKED, size, not weights.flag("symmetric", True), _is_ordered(weights))


def _default_strategy(weights: HfConfigReader) -> str:
    """The meaning of an absent ``strategy``."""
    if "group_size" not in weights:
        return "tensor"
    return "group" if read_group_size(weights) else "channel"


def _is_ordered(weights: HfConfigReader) -> bool:
    """Whether columns have an index of groups. The other kinds of ``actorder`` matter only during calibration."""
    if weights.is_bool("actorder"):
        return weights.flag("actorder", False)
    order = weights.text("actorder", "weight").lower()
    is_known = order in ("weight", "static", "group", "dynamic")
    require(is_known, weights, "actorder", "must be null, weight, static, group or dynamic")
    return order in ("group", "dynamic")


def _int8_scheme(group: HfConfigReader, weights: HfConfigReader) -> QuantScheme:
    check_bits(weights, "num_bits", 8)
    strategy = weights.text("strategy", _default_strategy(weights))
    require(strategy == "channel", weights, "strategy", "must be channel for weights of 8 bits")
    require(weights.flag("symmetric", True), weights, "symmetric", "must be true for weights of 8 bits")
    require("input_activations" in group, group, "input_activations", "must be there for weights of 8 bits")
    activations = group.part("input_activations")
    check_bits(activations, "num_bits", 8)
    require(activations.text("type", "int") == "int", activations, "type", "must be int")
    require(activations.flag("dynamic", False), activations, "dynamic", "must be true")
    require(activations.text("strategy", "tensor") == "token", activations, "strategy", "must be token")
    require(activations.flag("symmetric", True), activations, "symmetric", "must be true for activations")
    return QuantScheme(QuantLayout.INT8, 0, narrows_inputs=True)


def _fp8_scheme(group: HfConfigReader, weights: HfConfigReader) -> QuantScheme:
    check_bits(weights, "num_bits", 8)
    require(weights.flag("symmetric", True), weights, "symmetric", "must be true for weights of 8 bits")
    strategy = weights.text("strategy", _default_strategy(weights))
    is_known = strategy in ("tensor", "channel", "block")
    require(is_known, weights, "strategy", "must be tensor, channel or block for floats of 8 bits")
    rows, columns = (1, 0) if strategy == "channel" else (0, 0)
    if strategy == "block":
        rows, columns = read_block(weights, "block_structure")
    if "input_activations" in group:
        # The number of scales, one or one per token, and whether they are in the file do not matter: activations get
        # the scales that fit them best.
        activations = group.part("input_activations")
        check_bits(activations, "num_bits", 8)
        is_float = activations.text("type", "int") == "float"
        require(is_float, activations, "type", "must be float as that of the weights is")
        require(activations.flag("symmetric", True), activations, "symmetric", "must be true for activations")
    return QuantScheme(QuantLayout.FP8, columns, rows=rows, narrows_inputs="input_activations" in group)


def _fp4_scheme(
    layout: QuantLayout, strategy: str, size: int, _: HfConfigReader, weights: HfConfigReader
) -> QuantScheme:
    """Inputs that the checkpoint quantises too stay as they are."""
    check_bits(weights, "num_bits", 4)
    fits = weights.text("strategy", "") == strategy and weights.integer("group_size", 1, MAX_GROUP) == size
    require(fits, weights, "strategy", f"must be {strategy} with a group_size of {size} in this format")
    return QuantScheme(layout, size)


FORMATS: dict[str, dict[str, Callable[[HfConfigReader, HfConfigReader], QuantScheme]]] = {
    "int": {"pack-quantized": _packed_scheme, "int-quantized": _int8_scheme, "naive-quantized": _int8_scheme},
    "float": {
        "float-quantized": _fp8_scheme,
        "naive-quantized": _fp8_scheme,
        "mxfp4-pack-quantized": partial(_fp4_scheme, QuantLayout.MXFP4, "group", MX_GROUP),
        "nvfp4-pack-quantized": partial(_fp4_scheme, QuantLayout.NVFP4, "tensor_group", NV_GROUP),
    },
}
"""The reader of a group's scheme, for each type of weights and each of its formats in compressed-tensors."""
