"""Sampling defaults of a model, from its generation_config.json and from the operator's flags.

Of the rest of that file only the tokenizer's eos_token_id counts, as one id or as a list of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock.v1 as pb
from penstock.models.checkpoint.checkpoint import read_json
from penstock.models.errors import ModelError
from penstock.service.config.field_rules import Bound, ModelLimits, Number
from penstock.service.config.flags import ConfigError
from penstock.service.config.limits import FIELD_BOUNDS, UINT32_MAX

FILE = "generation_config.json"
AUTO, NONE = "auto", "none"
_VLLM = "vllm"
"""The same as none, in vLLM's words."""
_MAX_NEW_TOKENS = "max_new_tokens"
_DO_SAMPLE = "do_sample"
_NO_TOP_K = -1
"""vLLM's other value for no top_k, besides 0."""

_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip
_BOUNDS: Mapping[str, Bound] = {
    **{name: FIELD_BOUNDS["SamplingParams"][name] for name in _NAMES},
    _MAX_NEW_TOKENS: Number(1, UINT32_MAX),
}
_WHOLE = frozenset({"top_k", _MAX_NEW_TOKENS})
_NO_LIMITS = ModelLimits(vocab_size=0, max_model_len=0)
"""The bounds of these fields do not depend on the model."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults for the fields of a request's ``sampling``."""

    sampling: pb.SamplingParams = field(default_factory=pb.SamplingParams)
    """Only the fields for which the model or the operator sets a default."""
    token_limit: int | None = None
    """Limit on the output tokens of every request, even if it requests more."""

    def applied(self, sampling: pb.SamplingParams) -> pb.SamplingParams:
        """Returns a request's own fields, with the defaults of those that it does not set."""
        merged = pb.SamplingParams()
        merged.CopyFrom(self.sampling)
        merged.MergeFrom(sampling)
        return merged

    def __str__(self) -> str:
        shown = [f"{each.name} {value:g}" for each, value in self.sampling.ListFields()]
        if self.token_limit is not None:
            shown.append(f"at most {self.token_limit:,} output tokens")
        return ", ".join(shown)


def check_override(text: str) -> Mapping[str, object]:
    """Returns the values of --override-generation-config. Raises ConfigError."""
    flag = "--override-generation-config"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{flag}: is not JSON ({error}); write it as {{"temperature": 0.6}}') from None
    if not isinstance(values, dict):
        raise ConfigError(f'{flag}: must be a JSON object, such as {{"temperature": 0.6}}')
    for name in values:
        if name not in _BOUNDS:
            raise ConfigError(f"{flag}: there is no key {name}; there are {', '.join(_BOUNDS)}")
    try:
        return _checked(values)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def read_sampling_defaults(model: Path, source: str, override: str | None = None) -> SamplingDefaults:
    """Reads the defaults. ``source`` is AUTO for the model's own file, NONE, or the path of another file or of its
    directory. ``override`` takes precedence. Raises ModelError and ConfigError."""
    is_other = source not in (AUTO, NONE, _VLLM)
    values: dict[str, Any] = {}
    file = Path(source).expanduser() if is_other else model / FILE
    if file.is_dir():
        file /= FILE
    if is_other or (source == AUTO and file.exists()):
        found = read_json(file)
        try:
            values = _checked(found)
        except ValueError as error:
            remedy = "correct it, or ignore its sampling defaults with --generation-config none"
            raise ModelError(f"{file}: {error}: {remedy}") from None
    limit = values.get(_MAX_NEW_TOKENS) if is_other else None
    if override is not None:
        overriding = check_override(override)
        values |= overriding
        limit = overriding.get(_MAX_NEW_TOKENS, limit)
    max_tokens = values.pop(_MAX_NEW_TOKENS, None)
    return SamplingDefaults(pb.SamplingParams(max_tokens=max_tokens, **values), limit)


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling defaults among the values of a file. Raises ValueError, which names the wrong one."""
    checked = {}
    for name, bound in _BOUNDS.items():
        value = values.get(name)
        if value is None:
            continue
        if name == "top_k" and value == _NO_TOP_K:
            value = 0
        kind = int if name in _WHOLE else int | float
        if isinstance(value, bool) or not isinstance(value, kind):
            expected = "a whole number" if name in _WHOLE else "a number"
            raise ValueError(f"{name} must be {expected}; it is {json.dumps(value)[:60]}")
        problem = bound.problem(value, _NO_LIMITS)
        if problem is not None:
            raise ValueError(f"{name} {problem.text}")
        checked[name] = value
    do_sample = values.get(_DO_SAMPLE)
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ValueError(f"{_DO_SAMPLE} must be true or false; it is {json.dumps(do_sample)[:60]}")
    if do_sample is False:  # as in transformers, the file's own temperature is for callers that sample
        checked["temperature"] = 0
    return checked
