"""Converts OpenAI's and vLLM's constraints on an answer to the contract's ``Constraint``. The service checks whether it
is supported."""

import json
from collections.abc import Mapping
from typing import Any

import penstock.v1 as pb
from penstock.clients.constraints import STARTS, is_gbnf
from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.field_names import Names
from penstock.clients.gateway.requests.tool_choice import forces_call
from penstock.clients.gateway.schemas.chat import ChatRequest
from penstock.clients.gateway.schemas.common import GenerationBody, ResponseFormat, StructuredOutputs
from penstock.clients.gateway.schemas.completions import CompletionRequest
from penstock.v1 import AnyJson, Constraint, StringChoices


def fill_constraint(start: pb.GenerationStart, body: GenerationBody) -> None:
    """Sets the constraint from vLLM's fields or ``response_format``. Raises GatewayError."""
    found = dict(_named(body))
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid(second, f"not together with {first}: send one of them")
    for constraint in found.values():
        start.constraint.CopyFrom(constraint)
        if body.constrained_decoding_start is not None:
            start.constraint.start = STARTS[body.constrained_decoding_start]


def _named(body: GenerationBody) -> list[tuple[str, Constraint]]:
    """Returns the constraints of a body with the fields that have them."""
    found = []
    if body.structured_outputs is not None:
        found.append(("structured_outputs", _structured(body.structured_outputs)))
    for kind in ("json", "regex", "choice", "grammar"):
        field = f"guided_{kind}"
        if (value := getattr(body, field)) is not None:
            found.append((field, _constraint(kind, value, field)))
    if body.structural_tag is not None:
        found.append(("structural_tag", _constraint("structural_tag", body.structural_tag, "structural_tag")))
    if isinstance(body, ChatRequest | CompletionRequest) and body.response_format is not None:
        wanted = _response_format(body.response_format)
        if wanted is not None:
            found.append(("response_format", wanted))
    return found


def _structured(given: StructuredOutputs) -> Constraint:
    options = given.model_dump(exclude_none=True, by_alias=True)
    if options.get("json_object") is False:
        del options["json_object"]
    if len(options) != 1:
        kinds = "json, regex, choice, grammar, json_object or structural_tag"
        raise invalid("structured_outputs", f"must have one of {kinds}")
    [(kind, value)] = options.items()
    return _constraint(kind, value, f"structured_outputs.{kind}")


def _constraint(kind: str, value: Any, field: str) -> Constraint:
    """Converts one of vLLM's kinds of constraints."""
    match kind:
        case "json":
            return _schema(field, value)
        case "regex":
            return Constraint(regex=value)
        case "choice":
            return Constraint(choices=StringChoices(values=value))
        case "grammar":
            return Constraint(gbnf=value) if is_gbnf(value) else Constraint(lark=value)
        case "structural_tag":
            return Constraint(structural_tag_json=_json_text(field, value, "is not a structural tag"))
    return Constraint(any_json=AnyJson())


def _response_format(given: ResponseFormat) -> Constraint | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            field, schema = "response_format.schema", given.object_schema
        case "json_schema":
            if given.json_schema is None:
                raise invalid("response_format.json_schema", "is required: an object with name and schema")
            field, schema = "response_format.json_schema.schema", given.json_schema.json_schema
        case "structural_tag":
            return _constraint("structural_tag", given.structural_tag, "response_format")
        case _:
            raise invalid("response_format.type", "must be text, json_object, json_schema or structural_tag")
    return Constraint(any_json=AnyJson()) if schema is None else _schema(field, schema)


def _schema(field: str, schema: str | Mapping[str, Any]) -> Constraint:
    return Constraint(json_schema=_json_text(field, schema, "is not a JSON schema"))


def _json_text(field: str, value: str | Mapping[str, Any], problem: str) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except (ValueError, RecursionError):
        raise invalid(field, problem) from None


def constraint_field(body: GenerationBody) -> str | None:
    """Returns the field of a body that has its constraint, if any. Raises GatewayError."""
    return next((name for name, _ in _named(body)), None)


def is_constrained(body: ChatRequest) -> bool:
    """Whether a field, a forced call or a strict tool constrains the answer. Raises GatewayError."""
    is_strict = body.tool_choice != "none" and any(tool.function.strict for tool in body.tools or ())
    return is_strict or forces_call(body) or constraint_field(body) is not None


def constraint_names(body: GenerationBody) -> Names:
    """The caller's names for the contract's constraint."""
    field = constraint_field(body)
    if field == "structured_outputs":
        return _STRUCTURED_NAMES
    if isinstance(body, ChatRequest | CompletionRequest) and body.response_format and field == "response_format":
        schema = "schema" if body.response_format.type == "json_object" else "json_schema.schema"
        return ((r"constraint\.json_schema", f"response_format.{schema}"), (_CONSTRAINT, "response_format"))
    return ((_CONSTRAINT, field or "constrained_decoding_start"),)


_CONSTRAINT = r"constraint(\.choices\.values|\.\w+)?"
_STRUCTURED_NAMES: Names = (
    (r"constraint\.choices(\.values)?", "structured_outputs.choice"),
    (r"constraint\.json_schema", "structured_outputs.json"),
    (r"constraint\.regex", "structured_outputs.regex"),
    (r"constraint\.(lark|gbnf)", "structured_outputs.grammar"),
    (r"constraint\.structural_tag_json", "structured_outputs.structural_tag"),
    (_CONSTRAINT, "structured_outputs"),
)
