"""Converts OpenAI's and vLLM's constraints on an answer to the contract's ``Constraint``. The service checks whether it
is supported."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.clients.constraints import STARTS, is_gbnf
from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.field_names import Names
from penstock.clients.gateway.schemas.chat import ChatRequest, ResponseFormat
from penstock.clients.gateway.schemas.common import GenerationBody, StructuredOutputs
from penstock.v1 import constraint_pb2, generation_pb2 as pb

_KINDS = "json, regex, choice, grammar or json_object"


def fill_constraint(start: pb.Start, body: GenerationBody) -> None:
    """Sets the constraint from vLLM's fields or ``response_format``. Raises GatewayError."""
    found = dict(_named(body))
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid(second, f"not together with {first}: send one of them")
    for constraint in found.values():
        start.constraint.CopyFrom(constraint)
        if body.constrained_decoding_start is not None:
            start.constraint.start = STARTS[body.constrained_decoding_start]


def _named(body: GenerationBody) -> list[tuple[str, constraint_pb2.Constraint]]:
    """Returns the constraints of a body with the fields that have them."""
    found = []
    if body.structured_outputs is not None:
        found.append(("structured_outputs", _structured(body.structured_outputs)))
    if body.guided_json is not None:
        found.append(("guided_json", _schema("guided_json", body.guided_json)))
    if body.guided_regex is not None:
        found.append(("guided_regex", constraint_pb2.Constraint(regex=body.guided_regex)))
    if body.guided_choice is not None:
        found.append(
            ("guided_choice", constraint_pb2.Constraint(choices=constraint_pb2.Choices(values=body.guided_choice)))
        )
    if body.guided_grammar is not None:
        found.append(("guided_grammar", _grammar(body.guided_grammar)))
    if isinstance(body, ChatRequest) and body.response_format is not None:
        wanted = _response_format(body.response_format)
        if wanted is not None:
            found.append(("response_format", wanted))
    return found


def _structured(given: StructuredOutputs) -> constraint_pb2.Constraint:
    options: Mapping[str, Any] = given.model_dump(exclude_none=True)
    if options.get("json_object") is False:
        options = {name: value for name, value in options.items() if name != "json_object"}
    if len(options) != 1:
        raise invalid("structured_outputs", f"must have one of {_KINDS}")
    [(name, value)] = options.items()
    match name:
        case "json_schema":
            return _schema("structured_outputs.json", value)
        case "regex":
            return constraint_pb2.Constraint(regex=value)
        case "choice":
            return constraint_pb2.Constraint(choices=constraint_pb2.Choices(values=value))
        case "grammar":
            return _grammar(value)
    return constraint_pb2.Constraint(any_json=constraint_pb2.AnyJson())


def _response_format(given: ResponseFormat) -> constraint_pb2.Constraint | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            if given.object_schema is not None:
                return _schema("response_format.schema", given.object_schema)
            return constraint_pb2.Constraint(any_json=constraint_pb2.AnyJson())
        case "json_schema":
            if given.json_schema is None:
                raise invalid("response_format.json_schema", "is required: an object with name and schema")
            schema = given.json_schema.json_schema
            if schema is None:
                return constraint_pb2.Constraint(any_json=constraint_pb2.AnyJson())
            return _schema("response_format.json_schema.schema", schema)
    raise invalid("response_format.type", "must be text, json_object or json_schema")


def _schema(field: str, schema: str | Mapping[str, Any]) -> constraint_pb2.Constraint:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        return constraint_pb2.Constraint(json_schema=text)
    except (ValueError, RecursionError):
        raise invalid(field, "is not a JSON schema") from None


def _grammar(text: str) -> constraint_pb2.Constraint:
    return constraint_pb2.Constraint(gbnf=text) if is_gbnf(text) else constraint_pb2.Constraint(lark=text)


def constraint_field(body: GenerationBody) -> str | None:
    """Returns the field of a body that has its constraint, if any. Raises GatewayError."""
    return next((name for name, _ in _named(body)), None)


def is_constrained(body: ChatRequest) -> bool:
    """Whether a field, a forced call or a strict tool constrains the answer. Raises GatewayError."""
    is_strict = body.tool_choice != "none" and any(tool.function.strict for tool in body.tools or ())
    return is_strict or body.tool_choice not in (None, "auto", "none") or constraint_field(body) is not None


def constraint_names(body: GenerationBody, tool_places: Sequence[str] | None = None) -> Names:
    """The caller's names for the contract's constraint. ``tool_places`` has the paths of a chat's functions."""
    choice = body.tool_choice if isinstance(body, ChatRequest) else None
    field = constraint_field(body)
    if field == "structured_outputs":
        return _STRUCTURED_NAMES
    if choice not in (None, "auto", "none"):
        return ((_CONSTRAINT, _tools_name(body, tool_places)),)
    if isinstance(body, ChatRequest) and body.response_format is not None and field == "response_format":
        return _OBJECT_NAMES if body.response_format.type == "json_object" else _FORMAT_NAMES
    return ((_CONSTRAINT, field or _tools_name(body, tool_places)),)


def _tools_name(body: GenerationBody, places: Sequence[str] | None) -> str:
    """The name of the schema that constrains calls. If there are several, the invalid one is not known."""
    if not isinstance(body, ChatRequest):
        return "tools"
    choice = body.tool_choice
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    is_any = choice not in (None, "auto", "none") and name is None
    held = [
        at
        for at, tool in enumerate(body.tools or ())
        if is_any or (tool.function.name == name if name is not None else tool.function.strict)
    ]
    if len(held) != 1:
        return "tools"
    return f"{places[held[0]] if places is not None else f'tools[{held[0]}].function'}.parameters"


_CONSTRAINT = r"constraint(\.choices\.values|\.\w+)?"
_FORMAT_NAMES: Names = (
    (r"constraint\.json_schema", "response_format.json_schema.schema"),
    (_CONSTRAINT, "response_format"),
)
_OBJECT_NAMES: Names = (
    (r"constraint\.json_schema", "response_format.schema"),
    (_CONSTRAINT, "response_format"),
)
_STRUCTURED_NAMES: Names = (
    (r"constraint\.choices(\.values)?", "structured_outputs.choice"),
    (r"constraint\.json_schema", "structured_outputs.json"),
    (r"constraint\.regex", "structured_outputs.regex"),
    (r"constraint\.(lark|gbnf)", "structured_outputs.grammar"),
    (_CONSTRAINT, "structured_outputs"),
)
