"""``--unknown-fields ignore``: removes fields that are not in a body's schema before the body is validated."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel

from penstock.clients.gateway.schemas.unsupported import shown

_LOG_EVERY_S = 60.0
_MAX_NAMES = 20
"""The maximum number of names in one log line."""

_log = logging.getLogger(__name__)

_Models = tuple[type[BaseModel], ...]


class IgnoredFields:
    """Counts and logs ignored fields. Logs only names, never values."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._fields = Counter(
            "penstock_gateway_unknown_fields",
            "Unknown request fields that were ignored.",
            ("route",),
            registry=registry,
        )
        self._names: list[str] = []
        self._next_log = 0.0

    def note(self, route: str, names: Sequence[str]) -> None:
        """Counts fields of one request; logs at most one line per minute."""
        if not names:
            return
        self._fields.labels(route).inc(len(names))
        distinct = dict.fromkeys((*self._names, *names[:_MAX_NAMES]))
        self._names = list(distinct)[:_MAX_NAMES]
        now = time.monotonic()
        if now >= self._next_log:
            _log.warning("ignored unknown fields: %s", ascii(", ".join(self._names)))
            self._names.clear()
            self._next_log = now + _LOG_EVERY_S


def without_unknown_fields(body: Any, model: type[BaseModel], known: Collection[str]) -> tuple[Any, list[str]]:
    """Returns the body without the fields that ``model`` does not have, at any depth, and their paths, such as
    ``messages[].foo``. ``known`` are further names that the outermost object may have."""
    if not isinstance(body, dict):
        return body, []
    names: list[str] = []
    kept = {name: value for name, value in body.items() if name in known}
    rest = {name: value for name, value in body.items() if name not in known}
    return kept | _prune(rest, (model,), "", names), names


def _prune(value: Any, models: _Models, path: str, names: list[str]) -> Any:
    if not models:
        return value
    if isinstance(value, list):
        return [_prune(each, models, f"{path}[]", names) for each in value]
    if not isinstance(value, dict) or any(model.model_config.get("extra") == "allow" for model in models):
        return value
    kept = {}
    for name, member in value.items():
        found = [_fields(model)[name] for model in models if name in _fields(model)]
        inner = f"{path}.{shown(name)}" if path else shown(name)
        if found:
            kept[name] = _prune(member, tuple(model for each in found for model in each), inner, names)
        else:
            names.append(inner)
    return kept


@cache
def _fields(model: type[BaseModel]) -> Mapping[str, _Models]:
    """Returns the models of each field's value, by the field's name in a body."""
    fields: dict[str, _Models] = {}
    for name, field in model.model_fields.items():
        inner = tuple(_models_of(field.annotation))
        fields[field.alias or name] = inner
        if model.model_config.get("populate_by_name"):
            fields[name] = inner
    return fields


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models_of(each)]
