"""Reads a checkpoint's ``quantization_config``, of whatever tool, into a typed description."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.checkpoint.quantization.compressed_tensors import read_compressed_tensors
from penstock.models.checkpoint.quantization.fields import (
    check_bits,
    read_block,
    read_group_size,
    read_skipped_modules,
    require,
)
from penstock.models.checkpoint.quantization.modelopt import read_modelopt
from penstock.models.checkpoint.quantization.module_patterns import ModulePatterns
from penstock.models.checkpoint.quantization.scheme import MX_GROUP, Quantization, QuantLayout, QuantScheme
from penstock.models.errors import ModelError

CONFIG_FIELD = "quantization_config"

AT_LOAD = ("int8", "int4", "fp8")
"""What a float checkpoint can be quantised to. fp8 needs the CUDA backend, and is a checkpoint's method too."""


def quantization_from_config(config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantisation in a config.json, or None if there is none. Raises ModelError, naming the field."""
    fields = HfConfigReader(config)
    if CONFIG_FIELD not in fields:
        return None
    part = fields.part(CONFIG_FIELD)
    method = part.text("quant_method")
    require(method in METHODS, part, "quant_method", f"must be one of {', '.join(METHODS)}")
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
    require(bits in (4, 8), fields, "bits", "must be 4 or 8")
    name = "checkpoint_format" if "checkpoint_format" in fields else "format"
    layouts = {"gptq": QuantLayout.GPTQ, "gptq_v2": QuantLayout.GPTQ_V2}
    layout = fields.text(name, "gptq")
    require(layout in layouts, fields, name, "must be gptq or gptq_v2")
    require(fields.text("pack_dtype", "int32") == "int32", fields, "pack_dtype", "must be int32")
    # Patterns with a minus name modules that stay float; all others change bits or groups of some modules.
    are_skipped = all(pattern.startswith("-:") for pattern in fields.part("dynamic").names())
    require(are_skipped, fields, "dynamic", "must not quantise some modules otherwise than the rest")
    fields.flag("sym", True)  # zero points are stored either way
    is_ordered = fields.flag("desc_act", False)
    scheme = QuantScheme(
        layouts[layout], read_group_size(fields), has_zeros=True, is_ordered=is_ordered, is_wide=bits == 8
    )
    return Quantization("gptq", ((ModulePatterns(("Linear",)), scheme),), read_skipped_modules(fields))


def _awq(fields: HfConfigReader) -> Quantization:
    """Reads AutoAWQ's config. ``version`` is also called ``format``."""
    check_bits(fields, "bits", 4)
    name = "version" if "version" in fields else "format"
    require(fields.text(name, "gemm").lower() == "gemm", fields, name, "must be gemm")
    fields.flag("zero_point", True)  # zero points are stored either way
    scheme = QuantScheme(QuantLayout.AWQ, read_group_size(fields), has_zeros=True)
    return Quantization("awq", ((ModulePatterns(("Linear",)), scheme),), read_skipped_modules(fields))


def _fp8(fields: HfConfigReader) -> Quantization:
    """Reads the configs of DeepSeek, with blocks, and AutoFP8. Static activation scales are ignored."""
    for name, right in (("fmt", "e4m3"), ("scale_fmt", "float")):
        require(fields.text(name, right) == right, fields, name, f"must be {right}")
    activations = fields.text("activation_scheme", "dynamic")
    require(activations in ("dynamic", "static"), fields, "activation_scheme", "must be dynamic or static")
    rows, columns = read_block(fields, "weight_block_size") if "weight_block_size" in fields else (0, 0)
    scheme = QuantScheme(QuantLayout.FP8, columns, rows=rows, narrows_inputs=True)
    # The field's name before transformers supported the method.
    skipped = "ignored_layers" if "ignored_layers" in fields else "modules_to_not_convert"
    return Quantization("fp8", ((ModulePatterns(("Linear",)), scheme),), read_skipped_modules(fields, skipped))


def _mxfp4(fields: HfConfigReader) -> Quantization:
    """Reads gpt-oss's config. Only experts are quantised."""
    scheme = QuantScheme(QuantLayout.MXFP4, MX_GROUP)
    return Quantization("mxfp4", ((ModulePatterns(("re:.*\\.experts\\.",)), scheme),), read_skipped_modules(fields))


METHODS: dict[str, Callable[[HfConfigReader], Quantization | None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "modelopt": read_modelopt,
}
"""The reader of each ``quant_method``."""
