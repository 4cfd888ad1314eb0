"""Reads how a model turns text into a vector, from sentence-transformers' files or the operator's setting."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.models.checkpoint.files.model_files import MAX_CONFIG_BYTES, read_model_file
from penstock.models.errors import ModelError
from penstock.scheduler.plan import Pooling

MODULES = "modules.json"
POOLING = Path("1_Pooling") / "config.json"
REMEDY = "give --pooling last, mean or cls, which goes before the files"

_TRANSFORMER, _POOLING, _NORMALIZE = "Transformer", "Pooling", "Normalize"
_MODES = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "cls": Pooling.CLS}
_FLAGS = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
}
_FLAG_PREFIX = "pooling_mode_"


@dataclass(frozen=True)
class PoolingConfig:
    """How a model turns texts into vectors."""

    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    """Whether a vector is scaled to a length of 1 if the request does not set it."""


def read_embedding(path: Path, pooling: Pooling | None = None) -> PoolingConfig:
    """Reads the pooling of the model in a directory; ``pooling`` goes before its files. Raises ModelError."""
    modules = _modules(path)
    # Without a list of modules, nothing specifies that vectors keep their lengths.
    normalize = not modules or _NORMALIZE in modules
    if pooling is not None:
        return PoolingConfig(pooling, normalize)
    unknown = modules.keys() - {_TRANSFORMER, _POOLING, _NORMALIZE}
    if unknown:
        raise ModelError(f"{path / MODULES}: has the module {min(unknown)}, which is not supported: {REMEDY}")
    file = path / modules[_POOLING] / "config.json" if _POOLING in modules else path / POOLING
    return PoolingConfig(_pooling(file) if file.exists() else Pooling.LAST, normalize)


def _modules(path: Path) -> dict[str, str]:
    """The folders of the model's modules, by the last part of their type names; empty without a list."""
    file = path / MODULES
    if not file.exists():
        return {}
    listed = _read(file)
    try:
        modules = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in listed}
    except (TypeError, KeyError) as error:
        raise ModelError(f"{file}: must be a list of modules with type and path: {REMEDY}") from error
    for folder in modules.values():
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ModelError(f"{file}: a module's path must be a folder of the model, not {folder!r}: {REMEDY}")
    return modules


def _pooling(file: Path) -> Pooling:
    config = _read(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file}: is not a JSON object: {REMEDY}")
    mode = config.get("pooling_mode")
    if mode is not None:
        if isinstance(mode, str) and mode in _MODES:
            return _MODES[mode]
        shown = str(mode)[:60]
        raise ModelError(f"{file}: pooling_mode is {shown!r}, and must be one of {', '.join(_MODES)}: {REMEDY}")
    chosen = [name for name, value in config.items() if name.startswith(_FLAG_PREFIX) and value]
    if len(chosen) != 1 or chosen[0] not in _FLAGS:
        what = " and ".join(chosen) or "no pooling mode"
        raise ModelError(f"{file}: has {what} set, and must have one of {', '.join(_FLAGS)}: {REMEDY}")
    return _FLAGS[chosen[0]]


def _read(file: Path) -> Any:
    try:
        return json.loads(read_model_file(file, MAX_CONFIG_BYTES))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); check its rights, or {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: is not valid JSON ({error}); download it again, or {REMEDY}") from error
