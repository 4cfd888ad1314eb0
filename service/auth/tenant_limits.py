"""The file of tenants' weights, caps and rate limits: YAML with one key per tenant, and ``default`` for all others.

The keys below each tenant are those of ``_KEYS``, and ``adapters`` with the names of the LoRA adapters that it may use;
all are optional.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import yaml

from penstock.clients.host.reloaded_files import FileError, NamedFile
from penstock.scheduler.config import (
    MAX_REQUEST_RATE,
    MAX_TOKEN_BUDGET,
    MAX_WEIGHT,
    MIN_REQUEST_RATE,
    MIN_WEIGHT,
    TenantLimits,
)
from penstock.service.config.limits import MAX_LIVE_REQUESTS_CAP, MAX_NAMED_TENANTS, MAX_TOKENS_CAP, TENANT_NAME

TENANTS_FLAG = "--tenants-file"
_DEFAULT = "default"
_ADAPTERS = "adapters"


@dataclass(frozen=True, slots=True)
class TenantLimitsFile:
    """The limits of all tenants."""

    default: TenantLimits = field(default_factory=TenantLimits)
    named: Mapping[str, TenantLimits] = field(default_factory=dict)
    adapters: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The names of the LoRA adapters that a tenant may use; tenants without an entry may use all."""

    def adapters_of(self, tenant: str) -> frozenset[str] | None:
        """Returns the names of the adapters that a tenant may use; None: all."""
        return self.adapters.get(tenant if tenant in self.named else _DEFAULT)


class _LimitKey(NamedTuple):
    kind: type[int] | type[float]
    low: float
    high: float


_KEYS: Mapping[str, _LimitKey] = {
    "weight": _LimitKey(float, MIN_WEIGHT, MAX_WEIGHT),
    "max-prompt-tokens": _LimitKey(int, 1, MAX_TOKENS_CAP),
    "max-tokens": _LimitKey(int, 1, MAX_TOKENS_CAP),
    "max-live-requests": _LimitKey(int, 1, MAX_LIVE_REQUESTS_CAP),
    "requests-per-second": _LimitKey(float, MIN_REQUEST_RATE, MAX_REQUEST_RATE),
    "tokens-per-minute": _LimitKey(int, 1, MAX_TOKEN_BUDGET),
}


def parse_tenants(file: NamedFile, content: bytes) -> TenantLimitsFile:
    """Parses a tenants file. Raises FileError, which names the tenant and the key."""
    where = str(file)
    try:
        # The tree of nodes, not values: it keeps names as they are written (`007`, `no`), and shows duplicates.
        root = yaml.compose(file.text(content), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise FileError(f"{where}: is not valid YAML ({' '.join(str(error).split())}); correct it") from error
    if root is None:
        _fail(where, "is empty; write {} for no limits")
    adapters: dict[str, frozenset[str]] = {}
    limits = {}
    for name, node in _entries(root, where):
        limits[name], names = _limits(node, f"{where}: {name}")
        if names is not None:
            adapters[name] = names
    default = limits.pop(_DEFAULT, TenantLimits())
    for name in limits:
        if not TENANT_NAME.fullmatch(name):
            _fail(f"{where}: {name!r}", "is not a valid tenant name; use 1 to 64 characters of [A-Za-z0-9_.-]")
    if len(limits) > MAX_NAMED_TENANTS:
        _fail(where, f"names {len(limits):,} tenants; at most {MAX_NAMED_TENANTS:,} are possible, so group some")
    return TenantLimitsFile(default, limits, adapters)


def _limits(node: yaml.Node, where: str) -> tuple[TenantLimits, frozenset[str] | None]:
    """Returns a tenant's limits, and the names of the adapters that it may use, if it has such a key."""
    if isinstance(node, yaml.ScalarNode) and not node.value:
        return TenantLimits(), None  # only a name: all limits have their defaults
    given: dict[str, float] = {}
    adapters: frozenset[str] | None = None
    for written, value in _entries(node, where):
        if written == _ADAPTERS:
            adapters = _names(value, f"{where}: {written}")
            continue
        key = _KEYS.get(written.replace("_", "-"))
        if key is None:
            _fail(f"{where}: {written}", f"is not a key; there are {', '.join((*_KEYS, _ADAPTERS))}")
        given[written.replace("-", "_")] = _value(key, value, f"{where}: {written}")
    return TenantLimits(**given), adapters  # type: ignore[arg-type]  # each was parsed by its field's type


def _names(node: yaml.Node, where: str) -> frozenset[str]:
    items: list[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else [node]
    names = [item.value for item in items if isinstance(item, yaml.ScalarNode) and item.value]
    if not isinstance(node, yaml.SequenceNode) or len(names) < len(items):
        _fail(where, "must be a list of names, such as [support, legal]; [] is none")
    return frozenset(names)


def _value(key: _LimitKey, node: yaml.Node, where: str) -> float:
    text = node.value if isinstance(node, yaml.ScalarNode) else ""
    try:
        value = key.kind(text)
    except ValueError:
        wanted = "a whole number" if key.kind is int else "a number"
        _fail(where, f"must be {wanted} of {key.low:,} to {key.high:,.0f}; it is {text or 'none'!r}")
    if not key.low <= value <= key.high:
        _fail(where, f"must be {key.low:,} to {key.high:,.0f}; it is {value:,}")
    return value


def _entries(node: yaml.Node, where: str) -> Iterator[tuple[str, yaml.Node]]:
    """Yields keys and values of a mapping. Raises FileError, also for a duplicate key."""
    if not isinstance(node, yaml.MappingNode):
        _fail(where, "must contain keys and values, such as weight: 2")
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            _fail(where, "must have names as keys, such as weight")
        if key.value in seen:
            _fail(f"{where}: {key.value}", "occurs twice; remove one of them")
        seen.add(key.value)
        yield key.value, value


def _fail(where: str, problem: str) -> NoReturn:
    raise FileError(f"{where}: {problem}")
