"""Finds a model's files and checks them before anything is loaded: config, shards, headers, names, shapes, dtypes."""

import fnmatch
import glob
import importlib.util
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.models.architecture.foreign import ForeignSpec
from penstock.models.architecture.hf_config import HfConfigReader
from penstock.models.architecture.registry import find_spec, ignored_layer_types, text_config
from penstock.models.architecture.spec import ModelSpec
from penstock.models.checkpoint.classification_head import find_classifier, take_classifier
from penstock.models.checkpoint.files.model_files import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    open_model_file,
    read_model_file,
)
from penstock.models.checkpoint.files.safetensors_header import TensorEntry, read_header
from penstock.models.checkpoint.gguf_check import SUFFIX, check_gguf, shard_names
from penstock.models.checkpoint.info import CONFIG, EMBEDDING, FLOAT_DTYPES, HEAD, CheckpointInfo
from penstock.models.checkpoint.quantization.config import CONFIG_FIELD, quantization_from_config
from penstock.models.checkpoint.quantization.layout import QuantizedLinear, find_quantized
from penstock.models.checkpoint.quantization.modelopt import HF_QUANT_CONFIG, read_modelopt
from penstock.models.checkpoint.quantization.scheme import Quantization
from penstock.models.checkpoint.tensor_names import (
    DERIVED_TENSORS,
    find_kv_scales,
    find_text_model,
    find_views,
    rename_prefixes,
    stored_name,
)
from penstock.models.errors import ModelError

DEMO = "demo"
DEMO_DRAFTERS = ("demo_draft", "demo_eagle3")
"""The built-in drafters: a draft model and an EAGLE-3 head for the built-in model."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NO_PICKLES = "pickled weights are never loaded: use the model's safetensors version"
OTHER_WEIGHTS = {
    "*.gguf": "is a GGUF file: choose it with --gguf-file",
    **dict.fromkeys(("pytorch_model*.bin*", "*.pth", "*.pt", "*.ckpt"), _NO_PICKLES),
    "consolidated*.safetensors": "Mistral's own layout is not supported: use the model's Hugging Face layout, with "
    f"{CONFIG} and {SINGLE}",
    "*.bin": _NO_PICKLES,
}
"""File names of weights that cannot be loaded, each with a remedy."""

_BASE, _TABLE = "model.", "embed_tokens.weight"
"""The prefix of tensor names, which base-model checkpoints lack; and the name of a tensor that both kinds contain."""
_COMPARED_BYTES = 1 << 24
"""How many bytes of two tensors are compared at a time."""
_MAX_COMPARED_BYTES = 1 << 34
"""Larger tensors count as different. No model has one this large, but a sparse file can claim to."""

_TOKENIZER, _OTHER_TOKENIZERS = "tokenizer.json", ("tekken.json", "tokenizer.model", "tiktoken.model")
"""The file of the tokenizer, and those that are fetched in its place if a repository has none."""
HUB_WEIGHTS = (SINGLE, "model-?????-of-?????.safetensors")
"""The usual file names of weights. If a repository has others, the index names them."""
HUB_FILES = (
    CONFIG,
    HF_QUANT_CONFIG,
    INDEX,
    *HUB_WEIGHTS,
    "generation_config.json",
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "[0-9]_*/config.json",
)
"""The files that are fetched from a repository on the hub. The last two patterns are those of sentence-transformers."""


def resolve_model(name: str, weights: bool = True, revision: str | None = None, gguf_file: str | None = None) -> Path:
    """Returns a model's directory, or its GGUF file. ``name`` is a path, ``demo`` or one of its drafters, or a
    repository id of the Hugging Face hub. ``gguf_file`` is the name of a file in the directory or repository.

    A repository is fetched into huggingface_hub's cache unless it is there, with its weights if ``weights`` is set.
    Only a GGUF file is fetched if one is named. HF_HUB_OFFLINE=1 uses only the cache. ``revision`` is a branch, tag or
    commit of the repository. Raises ModelError.
    """
    is_local = name in (DEMO, *DEMO_DRAFTERS) or Path(name).expanduser().exists()
    if is_local and revision is not None:
        raise ModelError(
            f"--revision {revision}: {name} is not on the hub, and only a model there has revisions: leave it out"
        )
    path = Path(name).expanduser()
    if gguf_file is not None:
        _check_gguf_name(name, gguf_file)
    if name in (DEMO, *DEMO_DRAFTERS):
        return _demo_model(name)
    if path.is_dir():
        return path if gguf_file is None else _existing(path / gguf_file)
    if path.suffix == SUFFIX:
        return _existing(path)
    if path.exists():
        _refuse_other(name, [path.name])
        raise ModelError(f"{name}: is a file: give the directory that holds {CONFIG}")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(f"{name}: no such directory: give a model's directory, an id like owner/name, or {DEMO}")
    return _from_hub(name, weights, revision, gguf_file)


def _check_gguf_name(name: str, gguf_file: str) -> None:
    """Raises ModelError if a file of this name cannot be chosen in a model."""
    if name in (DEMO, *DEMO_DRAFTERS) or Path(name).suffix == SUFFIX:
        raise ModelError(
            f"--gguf-file {gguf_file}: {name} is not a directory or repository with such files: leave it out"
        )
    parts = Path(gguf_file).parts
    if not gguf_file.endswith(SUFFIX) or gguf_file.startswith("/") or ".." in parts:
        raise ModelError(f"--gguf-file {gguf_file}: must be the name of a {SUFFIX} file in {name}")


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ModelError(f"{path}: no such file: give a GGUF file, or a directory with --gguf-file")
    return path


def _demo_model(name: str) -> Path:
    """Returns the directory in the checkout, or in the installed package of demo models. Raises ModelError."""
    in_checkout = Path(__file__).parents[1] / name
    if in_checkout.is_dir():
        return in_checkout
    package = importlib.util.find_spec("penstock.demo_models")
    if package is None or package.origin is None:
        raise ModelError(f"{name}: the demo models are not installed: pip install penstock-llm-demo")
    return Path(package.origin).parent / name


def _refuse_other(where: object, names: Iterable[str]) -> None:
    """Raises ModelError if one of the files cannot be loaded. ``where`` is their directory, or the file."""
    names = sorted(names)
    for pattern, remedy in OTHER_WEIGHTS.items():
        if found := fnmatch.filter(names, pattern):
            at = where if str(where).endswith(found[0]) else f"{where}: {found[0]}"
            raise ModelError(f"{at}: {remedy}")


def _from_hub(name: str, weights: bool, revision: str | None, gguf_file: str | None) -> Path:
    # The library takes half a second to import, and a local directory does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RevisionNotFoundError,
    )

    at = name if revision is None else f"{name} at {revision}"
    at_revision: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        if gguf_file is not None:
            shards = [str(Path(gguf_file).with_name(shard)) for shard in shard_names(Path(gguf_file).name)]
            fetched = snapshot_download(name, allow_patterns=[glob.escape(shard) for shard in shards], **at_revision)
            if not (Path(fetched) / gguf_file).exists():
                raise ModelError(f"--gguf-file {gguf_file}: {at} has no such file: give another")
            return Path(fetched) / gguf_file
        files = [file for file in HUB_FILES if weights or file not in HUB_WEIGHTS]
        path = Path(snapshot_download(name, allow_patterns=files, **at_revision))
        if not (path / _TOKENIZER).exists():
            snapshot_download(name, revision=path.name, allow_patterns=[*_OTHER_TOKENIZERS])
        if weights and (path / INDEX).exists():
            missing = sorted({shard for shard in _weight_map(path).values() if not (path / shard).exists()})
            if missing:
                snapshot_download(name, revision=path.name, allow_patterns=[glob.escape(shard) for shard in missing])
        elif weights and not (path / SINGLE).exists():
            _refuse_other_repository(name, at_revision)
        return path
    except HFValidationError as error:
        raise ModelError(f"{name}: neither a directory nor a repository id: give one of the two") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{at}: not in the Hugging Face cache, and the hub cannot be reached: fetch it where there is a network, "
            "or give a directory"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"--revision {revision}: {name} has no such branch, tag or commit: give another") from error
    except HfHubHTTPError as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{name}: the hub refused ({reason}): check the id, and HF_TOKEN for a gated model") from error


def _refuse_other_repository(name: str, at_revision: Mapping[str, str]) -> None:
    """Raises ModelError if a repository has only weights that cannot be loaded, unless the hub is out of reach."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(name, **at_revision)
    except Exception:  # the hub cannot be reached: a later check names the missing file
        return
    _refuse_other(name, [Path(file).name for file in files])


def check_checkpoint(path: Path, weights: bool = True) -> CheckpointInfo:
    """Checks config.json and, if ``weights`` is set, every header of the safetensors files against the file's length
    and the model that the config describes. Reads no tensor, except an output head that should equal the embedding.
    Raises ModelError."""
    if path.is_file() and path.suffix == SUFFIX:
        return check_gguf(path, weights)
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory: give a model's directory")
    if not (path / CONFIG).exists():
        _refuse_other(path, os.listdir(path))
    whole = read_json(path / CONFIG)
    try:
        config = text_config(whole)
        spec = find_spec(config)
        classifier = find_classifier(whole, config, spec)
    except ModelError as error:
        raise ModelError(f"{path / CONFIG}: {str(error).removeprefix(CONFIG + ': ')}") from error
    quantization = find_quantization(path, config)
    ignored = None if isinstance(spec, ForeignSpec) else ignored_layer_types(config, spec)
    warnings = [f"{path / CONFIG}: {ignored}"] if ignored else []
    if classifier is not None:
        # There is no output head. The embedding stands in for it; its logits are never used.
        spec = replace(spec, tied_embeddings=True, head_bias=False)
    if not weights:
        return CheckpointInfo(path, config, spec, {}, None, {}, tuple(warnings), classifier=classifier)
    stored = read_entries(path)
    if classifier is not None:
        classifier, stored = take_classifier(classifier, stored, spec, path)
    if config is not whole and isinstance(spec, ForeignSpec):
        stored, num_skipped = find_text_model(stored)
        warnings.append(_skipped(path, whole, num_skipped))
    if isinstance(spec, ForeignSpec):
        spec = replace(spec, num_stored=sum(math.prod(entry.shape) for entry in stored.values()))
        return CheckpointInfo(path, config, spec, {}, None, {}, tuple(warnings))
    entries = rename_prefixes(spec.architecture, stored)
    if config is not whole:
        entries, num_skipped = find_text_model(entries)
        warnings.append(_skipped(path, whole, num_skipped))
    elif EMBEDDING not in entries and _TABLE in entries:
        # Embedding models are saved like this, without a head. The embedding stands in for it; its logits are never
        # used.
        spec = replace(spec, tied_embeddings=True)
        entries = {f"{_BASE}{name}": entry for name, entry in entries.items()}
    elif spec.tied_embeddings and EMBEDDING not in entries and HEAD in entries:
        entries[EMBEDDING] = entries[HEAD]
    if spec.tied_embeddings and _has_own_head(entries):
        spec = replace(spec, tied_embeddings=False)
        warnings.append(
            f"{path / CONFIG}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: both are used, as "
            "in transformers; set tie_word_embeddings to false"
        )
    entries, kv_scales = find_kv_scales(spec, entries)
    entries = find_views(spec, entries)
    quantized = find_quantized(quantization, spec, entries, path, partial(stored_name, spec))
    tensors = match_tensors(spec, entries, quantized, path)
    return CheckpointInfo(
        path, config, spec, tensors, quantization, quantized, tuple(warnings), kv_scales, classifier=classifier
    )


def find_quantization(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Returns the quantisation in config.json. Older checkpoints of NVIDIA's Model Optimizer have it only in another
    file. Raises ModelError."""
    is_in_config = config.get(CONFIG_FIELD) is not None or not (path / HF_QUANT_CONFIG).exists()
    file = path / (CONFIG if is_in_config else HF_QUANT_CONFIG)
    try:
        if is_in_config:
            return quantization_from_config(config)
        return read_modelopt(HfConfigReader(read_json(file)).part("quantization"))
    except ModelError as error:
        raise ModelError(f"{file}: {str(error).removeprefix(f'{file}: ').removeprefix(f'{CONFIG}: ')}") from error


def _skipped(path: Path, config: Mapping[str, Any], num_skipped: int) -> str:
    """Returns the warning that only part of a model is loaded."""
    return (
        f"{path / CONFIG}: only the language model of {', '.join(config['architectures'])} is served, for text: "
        f"{num_skipped} tensors of its other parts are not loaded"
    )


def _has_own_head(entries: Mapping[str, TensorEntry]) -> bool:
    """Whether a checkpoint has an output head that differs from the embedding, quantised or not."""
    parts = {name for name in entries if name.startswith(HEAD.removesuffix("weight"))}
    if parts != {HEAD} or EMBEDDING not in entries:
        return bool(parts)
    head, embedding = entries[HEAD], entries[EMBEDDING]
    if (head.file, head.offset) == (embedding.file, embedding.offset):
        return False
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or head.num_bytes > _MAX_COMPARED_BYTES:
        return True
    return _differ(head, embedding)


def _differ(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors of the same size contain different bytes. Raises ModelError."""
    try:
        with open(open_model_file(one.file), "rb") as first, open(open_model_file(other.file), "rb") as second:
            for begin in range(0, one.num_bytes, _COMPARED_BYTES):
                first.seek(one.offset + begin)
                second.seek(other.offset + begin)
                size = min(one.num_bytes - begin, _COMPARED_BYTES)
                if first.read(size) != second.read(size):
                    return True
    except OSError as error:
        raise ModelError(f"{one.file}: cannot be read ({error.strerror}): check the path and its rights") from error
    return False


def read_json(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises ModelError."""
    try:
        value = json.loads(read_model_file(file, max_bytes))
    except FileNotFoundError as error:
        raise ModelError(f"{file}: is missing: give a directory in Hugging Face's layout") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({os.strerror(error.errno or 0)}): check its rights") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: is not a JSON object: download it again")
    return value


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Returns all tensors of all shards by name. Raises ModelError."""
    if not (path / INDEX).exists():
        if (path / SINGLE).exists():
            return read_header(path / SINGLE)
        _refuse_other(path, os.listdir(path))
        raise ModelError(f"{path / SINGLE}: is missing, and so is {INDEX}: download the model's weights")
    weight_map = _weight_map(path)
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if not (path / shard).exists():
            raise ModelError(f"{path / shard}: this shard is missing, and {INDEX} names it: download it")
        shards[shard] = read_header(path / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelError(
                f"{path / shard}: tensor {name} is missing, but {INDEX} lists it here: download the shard again"
            )
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _weight_map(path: Path) -> dict[str, str]:
    """Returns the file name of each tensor, from the index. Raises ModelError."""
    index = path / INDEX
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty: download it again")
    for name, shard in weight_map.items():
        # A name with a separator could point anywhere on this machine.
        if not isinstance(shard, str) or shard != Path(shard).name or not shard.endswith(".safetensors"):
            raise ModelError(
                f"{index}: weight_map gives {name} the file {shard!r}: it must be a safetensors file beside it"
            )
    return weight_map


def match_tensors(
    spec: ModelSpec, entries: Mapping[str, TensorEntry], quantized: Mapping[str, QuantizedLinear], path: Path
) -> dict[str, TensorEntry]:
    """Returns the tensors that the spec needs besides quantised ones. Raises if one is missing, wrong or unexpected."""
    matched = {}
    for name, shape in spec.tensors():
        if name.removesuffix(".weight") in quantized:
            continue
        entry = entries.get(name)
        if entry is None:
            raise ModelError(f"{path}: tensor {name} is missing, and {CONFIG} calls for it: download the weights again")
        entry.check_shape(name, shape, CONFIG)
        if entry.dtype not in FLOAT_DTYPES:
            raise ModelError(
                f"{entry.file}: tensor {name} has dtype {entry.dtype}: weights must be {', '.join(FLOAT_DTYPES)}; "
                "use the unquantised checkpoint"
            )
        matched[name] = entry
    parts = {f"{linear.name}.{part}" for linear in quantized.values() for part in linear.parts}
    for name in entries.keys() - matched.keys() - parts:
        # An unused tensor means that the model would compute something other than what was trained.
        if not name.endswith(DERIVED_TENSORS) and not (name == HEAD and spec.tied_embeddings):
            raise ModelError(
                f"{entries[name].file}: tensor {name} has no place in {spec.architecture} as {CONFIG} describes it: "
                "config and weights belong to different models"
            )
    return matched
