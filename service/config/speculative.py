"""Parses ``--speculative-config``: the operator's choice of how tokens are drafted, as JSON with vLLM's names."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import fields, replace

from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig
from penstock.service.config.flags import ConfigError

MAX_DRAFTS = 32
"""Limit on the drafted tokens of a row in a step."""

NONE = "none"
"""Instead of JSON: nothing is drafted."""

_FLAG = "--speculative-config"
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 8}'
_DRAFTS = {
    DraftMethod.AUTO: 15,
    DraftMethod.NGRAM: 8,
    DraftMethod.SUFFIX: 16,
    DraftMethod.DRAFT_MODEL: 5,
    DraftMethod.EAGLE3: 5,
    DraftMethod.MTP: 3,
}
"""Defaults of num_speculative_tokens. Drafts of cheap methods may be long. With 15, a row's step has 16 tokens, which
CPU kernels compute together."""
_AUTO = SpeculationConfig(DraftMethod.AUTO, _DRAFTS[DraftMethod.AUTO])
_LOOKUP = (DraftMethod.AUTO, DraftMethod.NGRAM)
_WITH_MODEL = (DraftMethod.DRAFT_MODEL, DraftMethod.EAGLE3)


class _ConfigKey(NamedTuple):
    """A key of the JSON and its bounds."""

    methods: tuple[DraftMethod, ...]
    """The methods that have this key."""
    low: float = 0
    high: float = 0
    """``low`` and ``high`` are the bounds of a number."""


_KEYS: Mapping[str, _ConfigKey] = {
    "num_speculative_tokens": _ConfigKey(tuple(DraftMethod), 1, MAX_DRAFTS),
    "model": _ConfigKey(_WITH_MODEL),
    "prompt_lookup_max": _ConfigKey(_LOOKUP, 1, 64),
    "prompt_lookup_min": _ConfigKey(_LOOKUP, 1, 64),
    "suffix_decoding_max_tree_depth": _ConfigKey((DraftMethod.SUFFIX,), 2, 256),
    "suffix_decoding_max_cached_requests": _ConfigKey((DraftMethod.SUFFIX,), 0, 100_000),
    "suffix_decoding_max_spec_factor": _ConfigKey((DraftMethod.SUFFIX,), 0.01, 100),
    "suffix_decoding_min_token_prob": _ConfigKey((DraftMethod.SUFFIX,), 0, 1),
}


def choose_speculation(text: str | None, tensor_parallel_size: int) -> SpeculationConfig | None:
    """Returns how tokens are drafted by the flag's text, which may be missing; None: not at all. By default, ranks that
    share a model draft nothing, since all must draft the same number of tokens. Raises ConfigError."""
    if text is None:
        return _AUTO if tensor_parallel_size == 1 else None
    return parse_speculation(text)


def parse_speculation(text: str) -> SpeculationConfig | None:
    """Returns the configuration of a JSON text, or None for ``none``. Raises ConfigError, with the key and its correct
    values."""
    if text == NONE:
        return None
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_FLAG}: is not valid JSON ({error}); write it as {_EXAMPLE}, or {NONE}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{_FLAG}: must be an object, such as {_EXAMPLE}")
    method = _method(given)
    values: dict[str, Any] = {"num_speculative_tokens": _DRAFTS[method]}
    for key, value in given.items():
        if key != "method":
            values[key] = _checked(method, key, value)
    if method in _WITH_MODEL and "model" not in values:
        raise _wrong("model", f"is required by {method.value}; give a directory, or an id on the Hugging Face Hub")
    speculation = SpeculationConfig(method, **values)
    least, most = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    if least <= most:
        return speculation
    if "prompt_lookup_min" not in given:
        return replace(speculation, prompt_lookup_min=most)
    if "prompt_lookup_max" not in given:
        return replace(speculation, prompt_lookup_max=least)
    raise _wrong("prompt_lookup_min", f"must be at most prompt_lookup_max, {most}; it is {least}")


def _method(given: Mapping[str, Any]) -> DraftMethod:
    there_are = f"there are {', '.join(method.value for method in DraftMethod)}"
    if "method" not in given:
        raise _wrong("method", f"is required; {there_are}")
    try:
        return DraftMethod(given["method"])
    except ValueError:
        raise _wrong("method", f"there is no {given['method']!r}; {there_are}") from None


def _checked(method: DraftMethod, key: str, value: object) -> object:
    known = _KEYS.get(key)
    if known is None:
        theirs = [name for name, each in _KEYS.items() if method in each.methods]
        raise _wrong(key, f"there is no such key; {method.value} has {', '.join(theirs)}")
    if method not in known.methods:
        raise _wrong(key, f"only applies to {' and '.join(each.value for each in known.methods)}; leave it out")
    kind = next(field.type for field in fields(SpeculationConfig) if field.name == key)
    if key == "model":
        if not isinstance(value, str) or not value:
            raise _wrong(key, f"must be a directory, or an id on the Hugging Face Hub; it is {value!r}")
        return value
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not is_number or not known.low <= value <= known.high:  # type: ignore[operator]
        wanted = "a whole number" if kind is int else "a number"
        raise _wrong(key, f"must be {wanted}, {known.low:,} to {known.high:,}; it is {value!r}")
    return value


def _wrong(key: str, problem: str) -> ConfigError:
    return ConfigError(f"{_FLAG}: {key}: {problem}")
