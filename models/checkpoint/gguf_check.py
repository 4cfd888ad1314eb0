"""Checks a GGUF file, or the files of a model that is split, before anything is loaded. Reads no tensor except the
factors of the rope. Does not import torch.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from penstock.models.architecture.registry import spec_from_config
from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.files.ggml import BLOCKS
from penstock.models.checkpoint.gguf.config import config_of, described
from penstock.models.checkpoint.gguf.families import PERMUTED
from penstock.models.checkpoint.gguf.header import GgufHeader, damaged, read_header
from penstock.models.checkpoint.gguf.hybrid_tensors import as_in_file
from penstock.models.checkpoint.gguf.metadata import ARCHITECTURE
from penstock.models.checkpoint.gguf_tensors import FoundTensor, find_four_bit, find_tensors, with_rope_factors
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.quantization.module_patterns import ModulePatterns
from penstock.models.checkpoint.quantization.scheme import Quantization
from penstock.models.errors import ModelError

SUFFIX = ".gguf"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_SHARDS = 1000
_EIGHT_BIT = "Q8_0"
KEPT = Quantization("gguf", (), ModulePatterns(()))
"""The quantisation of files with linears that are kept as they are stored."""


def check_gguf(path: Path, weights: bool = True) -> CheckpointInfo:
    """Checks the metadata of a file and, if ``weights`` is set, that it has exactly the tensors of the model. Raises
    ModelError."""
    header = _read_shards(path)
    config, keys = config_of(header)
    try:
        spec = spec_from_config(config)
    except ModelError as error:
        raise described(error, header, keys) from error
    spec = replace(as_in_file(spec, header), interleaved_rope=_rotates_neighbours(header, spec))
    spec = with_rope_factors(header, spec)
    if not weights:
        return CheckpointInfo(path, config, spec, {}, None, {})
    found = find_tensors(header, spec)
    _check_tensors(path, found, spec)
    entries = {name: tensor.entry for name, tensor in found.items()}
    quantized = find_four_bit(spec, entries)
    for linear in quantized:
        del entries[f"{linear}.weight"]
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.dtype] += tensor.num_bytes
    return CheckpointInfo(
        path,
        config,
        spec,
        entries,
        KEPT if quantized else None,
        quantized,
        _warnings(path, sizes),
        is_eight_bit=sizes[_EIGHT_BIT] * 2 > sizes.total(),
    )


def shard_names(name: str) -> list[str]:
    """Returns the names of all files of a model, from the name of one: itself, unless it ends like
    ``-00001-of-00003.gguf``."""
    match = _SHARD.fullmatch(name)
    count = int(match[3]) if match else 1
    if match is None or not 1 <= count <= _MAX_SHARDS:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}{SUFFIX}" for number in range(1, count + 1)]


def _read_shards(path: Path) -> GgufHeader:
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return header
    names = shard_names(path.name)
    if len(names) != count:
        raise ModelError(
            f"{path}: is one of {str(count)[:20]} files, and its name does not end like -00001-of-00003{SUFFIX}: give "
            "the files the names that they had"
        )
    if names[0] != path.name:
        raise ModelError(f"{path}: is not the first of the model's {count} files: give {names[0]}")
    tensors = dict(header.tensors)
    for name in names[1:]:
        if not (path.parent / name).exists():
            raise ModelError(f"{path.parent / name}: this file of the model is missing: download it")
        for tensor, entry in read_header(path.parent / name).tensors.items():
            if tensor in tensors:
                raise damaged(entry.file, f"tensor {tensor} is also in {tensors[tensor].file.name}")
            tensors[tensor] = entry
    return replace(header, tensors=tensors)


def _rotates_neighbours(header: GgufHeader, spec: ModelSpec) -> bool:
    """Whether the rope rotates neighbours, in the order of rows that the file has."""
    key = "glm4.rope.dimension_sections"
    sections = header.metadata.get(key)
    if header.metadata[ARCHITECTURE] != "glm4" or sections is None:
        return spec.interleaved_rope or header.metadata[ARCHITECTURE] in PERMUTED
    # GLM-4.1V, whose rows are in another order than GLM-4's. In text, all sections have the same position.
    if not isinstance(sections, list) or not all(isinstance(each, int) and each > 0 for each in [*sections, 0, 0][:2]):
        raise damaged(header.path, f"{key} is {str(sections)[:60]}, and must begin with two numbers above zero")
    return False


def _check_tensors(path: Path, found: Mapping[str, FoundTensor], spec: ModelSpec) -> None:
    """Raises ModelError if a tensor of the model is missing or has another shape, or if the file has others."""
    wanted = dict(spec.tensors())
    for name, shape in wanted.items():
        tensor = found.get(name)
        if tensor is None:
            raise damaged(
                path, f"tensor {name} of {spec.architecture} is missing (by its name in Hugging Face's layout)"
            )
        if tensor.entry.shape != shape:
            raise damaged(
                path,
                f"tensor {tensor.source} has the shape {list(tensor.entry.shape)}, and the metadata calls for "
                f"{list(shape)}",
            )
    for name in found.keys() - wanted.keys():
        # An unused tensor means that the model would compute something other than what was trained.
        raise ModelError(
            f"{path}: tensor {found[name].source} has no place in {spec.architecture} as the metadata describes it: "
            "use the model's safetensors version"
        )


def _warnings(path: Path, sizes: Counter[str]) -> tuple[str, ...]:
    """Returns a warning if weights take more memory than the file, since they are dequantised."""
    [(dtype, num_bytes)] = sizes.most_common(1)
    if dtype not in BLOCKS or dtype in ("Q4_0", _EIGHT_BIT) or num_bytes * 2 <= sizes.total():
        return ()
    warning = (
        f"{path}: most weights are {dtype}, which no kernel reads: they are dequantised and take more memory than the "
        "file; --quantization int4 or int8 quantises them again"
    )
    return (warning,)
