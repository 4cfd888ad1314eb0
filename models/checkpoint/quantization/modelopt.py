"""Reads NVIDIA's Model Optimizer's description of a checkpoint: ``quantization_config`` in config.json, or, where there
is none, hf_quant_config.json."""

import re
from collections import defaultdict
from collections.abc import Collection

from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.checkpoint.quantization.fields import MAX_GROUP, patterns_of, read_patterns, require
from penstock.models.checkpoint.quantization.module_patterns import ModulePatterns
from penstock.models.checkpoint.quantization.scheme import NV_GROUP, Quantization, QuantLayout, QuantScheme

HF_QUANT_CONFIG = "hf_quant_config.json"
BLOCK = 128
"""The number of rows and of columns that share a scale in FP8_PB_WO."""

SCHEMES = {
    "FP8": QuantScheme(QuantLayout.FP8, 0, rows=0, narrows_inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": QuantScheme(QuantLayout.FP8, 0, narrows_inputs=True),
    "FP8_PB_WO": QuantScheme(QuantLayout.FP8, BLOCK, rows=BLOCK),
    "NVFP4": QuantScheme(QuantLayout.NVFP4, NV_GROUP),
    "W4A16_NVFP4": QuantScheme(QuantLayout.NVFP4, NV_GROUP),
}
"""The scheme of each algorithm. Inputs that NVFP4 quantises too stay as they are."""
MIXED = "MIXED_PRECISION"


def read_modelopt(fields: HfConfigReader) -> Quantization | None:
    """Reads the part of a file that has ``quant_algo``; returns None if it has none, since only the KV cache is
    quantised. Static scales of inputs are ignored. Raises ModelError."""
    if "quant_algo" not in fields:
        return None
    algorithm = _algorithm(fields, (*SCHEMES, MIXED))
    names = defaultdict[QuantScheme, list[str]](list)
    if algorithm == MIXED:
        layers = fields.part("quantized_layers")
        for name in layers.names():
            names[SCHEMES[_algorithm(layers.part(name), SCHEMES)]].append(name)
    else:
        names[SCHEMES[algorithm]].append("Linear")
    schemes = tuple((patterns_of(fields, "quantized_layers", modules), scheme) for scheme, modules in names.items())
    skipped = "ignore" if "ignore" in fields else "exclude_modules"
    ignored = read_patterns(fields, skipped, _as_expression) if skipped in fields else ModulePatterns(())
    return Quantization("modelopt", schemes, ignored)


def _algorithm(fields: HfConfigReader, known: Collection[str]) -> str:
    """Returns the name of an algorithm, one of ``known``. Raises ModelError."""
    name = fields.text("quant_algo").upper()
    require(name in known, fields, "quant_algo", f"must be one of {', '.join(known)}")
    is_nv = name in SCHEMES and SCHEMES[name].layout is QuantLayout.NVFP4
    size = fields.integer("group_size", 0, MAX_GROUP, NV_GROUP if is_nv else 0)
    require(not is_nv or size == NV_GROUP, fields, "group_size", f"must be {NV_GROUP}")
    return name


def _as_expression(wildcard: str) -> str:
    """Returns the expression for a module and those in it, named by the end of a dotted name with * and ?."""
    expression = re.escape(wildcard).replace(r"\*", ".*").replace(r"\?", ".")
    begin = "" if expression.startswith(".*") else r"(.*\.)?"
    return rf"re:{begin}{expression}(\.|$)"
