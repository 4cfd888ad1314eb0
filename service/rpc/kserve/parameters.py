"""Reads the parameters of a request: those in the map of the message, and those in the JSON text of the input
``sampling_parameters``, with vLLM's names.

Numbers and bools may also be texts, as in the samples of Triton's vLLM backend.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import penstock.v1 as pb
from penstock.clients.constraints import set_constraint
from penstock.clients.errors import InvalidOption
from penstock.service.config.limits import MAX_BIASES, UINT32_MAX
from penstock.service.config.text_size import utf8_bytes
from penstock.service.errors import invalid
from penstock.service.rpc.foreign.grammars import set_grammar
from penstock.service.rpc.kserve.tensors import shown, unknown

SAMPLING_INPUT = "sampling_parameters"
MAX_JSON_BYTES = 512 << 10
"""Limit on the JSON text: parsing it blocks the event loop for 5 ms."""
_MAX_NAME = 64
"""How many characters of a parameter's name an error repeats."""
_MICROSECONDS_IN_MS = 1000
_OFF = -1
"""vLLM's value for a random seed, and for all tokens in ``top_k``."""
_NO_SEQUENCES = "is not supported: requests do not belong to a sequence; omit it"
_ONLY_COUNTS = "is not supported here; omit it, or set the input return_cumulative_logprob"
_UNSUPPORTED: Mapping[str, str] = {
    "best_of": "is not supported; send n",
    "guided_decoding": "is not supported; send structured_outputs",
    "include_stop_str_in_output": "is not supported: outputs end before the stop string; omit it",
    "logprobs": _ONLY_COUNTS,
    "lora_name": "is not supported; send the adapter's name as model_name",
    "prompt_logprobs": _ONLY_COUNTS,
    "sequence_id": _NO_SEQUENCES,
    "sequence_start": _NO_SEQUENCES,
    "sequence_end": _NO_SEQUENCES,
}
"""Known parameters that this service does not support, with the reason and the remedy."""

Setter = Callable[[Any, Any], None]
"""Sets a field of a message from a parameter's value."""


class _Wrong(Exception):
    """A value of the wrong type. The text names the right one."""


def fill_start(start: pb.GenerationStart, request: Any, sampling_json: str | None) -> dict[str, str]:
    """Sets the fields of a GenerationStart from the parameters of a ModelInferRequest. Returns the paths of the
    parameters by those of the fields, for errors. Raises ServiceError for a parameter that is unknown or given twice,
    or whose value has the wrong type."""
    return _fill(start, GENERATION_PARAMETERS, chain(_of_map(request.parameters), _of_json(sampling_json)))


def fill_embed_request(embed: pb.EmbedRequest, request: Any) -> dict[str, str]:
    """Does the same for an EmbedRequest."""
    return _fill(embed, _EMBEDDING_PARAMETERS, _of_map(request.parameters))


def _fill(
    message: Any, known: Mapping[str, tuple[str, Setter]], given: Iterable[tuple[str, str, Any]]
) -> dict[str, str]:
    """Sets the fields of a message from parameters with their name, path and value."""
    paths: dict[str, str] = {}
    for name, where, value in given:
        path = f"{where}.{name[:_MAX_NAME]}"
        if name not in known:
            if name in _UNSUPPORTED:
                raise invalid(path, _UNSUPPORTED[name])
            raise unknown(where, "parameter", name, known)
        field, set_field = known[name]
        if field in paths:
            raise invalid(path, f"is in {paths[field]} too; send it once")
        paths[field] = path
        try:
            set_field(message, value)
        except _Wrong as error:
            raise invalid(path, f"{error}; it is {_given(value)}") from None
        except InvalidOption as error:
            raise invalid(path, error.problem) from None
        except UnicodeEncodeError:
            raise invalid(path, "contains half of a surrogate pair, which is not a character") from None
        except ValueError:
            raise invalid(path, f"is out of range; it is {_given(value)}") from None
        except TypeError:
            raise invalid(path, "contains a value of the wrong type") from None
    return paths


def _of_map(parameters: Any) -> Iterator[tuple[str, str, Any]]:
    for name in parameters:
        kind = parameters[name].WhichOneof("parameter_choice")
        yield name, "parameters", None if kind is None else getattr(parameters[name], kind)


def _of_json(text: str | None) -> Iterator[tuple[str, str, Any]]:
    if not text:
        return
    if utf8_bytes(text) > MAX_JSON_BYTES:
        raise invalid(SAMPLING_INPUT, f"at most {MAX_JSON_BYTES:,} bytes; it has {utf8_bytes(text):,}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise invalid(SAMPLING_INPUT, 'must be the JSON text of an object, such as {"max_tokens": 16}')
    for name, value in values.items():
        if value is not None:  # vLLM's value for its default
            yield name, SAMPLING_INPUT, value


def _given(value: Any) -> str:
    """Returns a value for an error; of a list or an object, which may be long and deep, only what it is."""
    if value is None:
        return "not set"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return shown(str(value))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _Wrong("must be a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise _Wrong("must be a number") from None


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _Wrong("must be an integer")
    try:
        number = int(value)
    except (ValueError, OverflowError):  # also an integer of too many digits, and no number
        raise _Wrong("must be an integer") from None
    if isinstance(value, float) and number != value:
        raise _Wrong("must be an integer")
    return number


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _Wrong("must be true or false")


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"must be a list of {what}, in the JSON text of the input {SAMPLING_INPUT}")
    return value


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else _list(value, "texts")


def _sampling(field: str, convert: Callable[[Any], Any], off: int | None = None) -> tuple[str, Setter]:
    """Returns how a field of SamplingParams is set. ``off`` is a value that stands for none."""

    def set_value(start: pb.GenerationStart, value: Any) -> None:
        converted = convert(value)
        if isinstance(converted, list):
            getattr(start.sampling, field).extend(converted)
        elif off is None or converted != off:
            setattr(start.sampling, field, converted)

    return f"sampling.{field}", set_value


def _field(name: str, convert: Callable[[Any], Any]) -> tuple[str, Setter]:
    """Returns how a field of the message itself is set."""
    return name, lambda message, value: setattr(message, name, convert(value))


def _ids(value: Any) -> list[int]:
    ids = _list(value, "token ids")
    if set(map(type, ids)) - {int}:
        raise TypeError
    return ids


def _set_seed(start: pb.GenerationStart, value: Any) -> None:
    seed = _integer(value)
    if seed != _OFF:
        start.sampling.seed = seed % (1 << 32) if seed < 0 else seed  # vLLM takes negative ones


def _set_logit_bias(start: pb.GenerationStart, value: Any) -> None:
    if not isinstance(value, dict):
        raise _Wrong(f"must be an object of numbers by token id, in the JSON text of the input {SAMPLING_INPUT}")
    if len(value) > MAX_BIASES:  # here too: a map with many colliding keys is slow
        raise _Wrong(f"at most {MAX_BIASES:,} entries")
    for token_id, bias in value.items():
        start.sampling.logit_bias[_integer(token_id)] = _number(bias)


def _set_skip_special_tokens(start: pb.GenerationStart, value: Any) -> None:
    start.output.include_special_tokens = not _flag(value)


def _set_timeout(message: Any, value: Any) -> None:
    """Triton's unit is the microsecond; 0 means none."""
    microseconds = _integer(value)
    if microseconds:
        message.timeout_ms = min(-(-microseconds // _MICROSECONDS_IN_MS), UINT32_MAX)


def _set_structured_outputs(start: pb.GenerationStart, value: Any) -> None:
    """Sets the constraint from an object with vLLM's names."""
    given = {kind: each for kind, each in value.items() if each is not None} if isinstance(value, dict) else {}
    if len(given) != 1:
        raise _Wrong(f"must be an object with one of {', '.join(_CONSTRAINTS)} and grammar")
    [(kind, constraint)] = given.items()
    if kind == "grammar" and isinstance(constraint, str):
        set_grammar(start.constraint, constraint)
    elif kind in _CONSTRAINTS:
        set_constraint(start.constraint, {_CONSTRAINTS[kind]: constraint})
    else:
        raise _Wrong(f"must be an object with one of {', '.join(_CONSTRAINTS)} and grammar")


_CONSTRAINTS: Mapping[str, str] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choices",
    "json_object": "any_json",
    "structural_tag": "structural_tag_json",
}
"""The constraints that vLLM names, with penstock.v1's names; a grammar may have two kinds."""


def _ignore(message: Any, value: Any) -> None:
    """Checks only the type: the last response is always marked, and has outputs."""
    _flag(value)


GENERATION_PARAMETERS: Mapping[str, tuple[str, Setter]] = {
    "allowed_token_ids": _sampling("allowed_token_ids", _ids),
    "bad_words": _sampling("bad_words", _texts),
    "frequency_penalty": _sampling("frequency_penalty", _number),
    "ignore_eos": _sampling("ignore_eos", _flag),
    "logit_bias": ("sampling.logit_bias", _set_logit_bias),
    "max_tokens": _sampling("max_tokens", _integer),
    "min_p": _sampling("min_p", _number),
    "min_tokens": _sampling("min_tokens", _integer),
    "n": _sampling("n", _integer),
    "presence_penalty": _sampling("presence_penalty", _number),
    "priority": _field("priority", _integer),
    "repetition_penalty": _sampling("repetition_penalty", _number),
    "seed": ("sampling.seed", _set_seed),
    "skip_special_tokens": ("output.include_special_tokens", _set_skip_special_tokens),
    "stop": _sampling("stop", _texts),
    "stop_token_ids": _sampling("stop_token_ids", _ids),
    "structured_outputs": ("constraint", _set_structured_outputs),
    "temperature": _sampling("temperature", _number),
    "thinking_token_budget": _sampling("thinking_token_budget", _integer),
    "timeout": ("timeout_ms", _set_timeout),
    "top_k": _sampling("top_k", _integer, off=_OFF),
    "top_p": _sampling("top_p", _number),
    "triton_enable_empty_final_response": ("triton_enable_empty_final_response", _ignore),
    "truncate_prompt_tokens": _field("truncate_prompt_tokens", _integer),
}
"""The parameters of a request for text: the field that each one sets, and how."""
_EMBEDDING_PARAMETERS: Mapping[str, tuple[str, Setter]] = {
    "dimensions": _field("dimensions", _integer),
    "normalize": _field("normalize", _flag),
    "priority": _field("priority", _integer),
    "truncate_prompt_tokens": _field("truncate_prompt_tokens", _integer),
}
"""The same for an embedding."""
