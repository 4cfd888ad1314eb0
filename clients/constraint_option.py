"""What an output must match, as callers in Python and lines of batch files say it: an object with one field."""

import json
from collections.abc import Mapping

from penstock.clients.errors import InvalidOption, shown
from penstock.v1 import constraint_pb2

_TEXTS = ("regex", "lark", "gbnf")
_KINDS = "json_schema, any_json, regex, lark, gbnf or choices"


def set_constraint(constraint: constraint_pb2.Constraint, value: object) -> None:
    """``{"json_schema": ...}`` with a schema or its JSON text, ``{"any_json": True}``, ``{"choices": [...]}``, or a
    text for ``regex``, ``lark`` or ``gbnf``. Raises InvalidOption."""
    if not isinstance(value, Mapping) or len(value) != 1:
        raise InvalidOption("constraint", f"expected an object with one of {_KINDS}, got {shown(value)}")
    [(kind, given)] = value.items()
    where = f"constraint.{kind}" if isinstance(kind, str) else "constraint"
    try:
        if kind == "json_schema":
            constraint.json_schema = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        elif kind == "any_json" and given is True:
            constraint.any_json.SetInParent()
        elif kind == "choices" and not isinstance(given, str):
            constraint.choices.values.extend(given)
        elif kind in _TEXTS:
            setattr(constraint, kind, given)
        else:
            raise InvalidOption("constraint", f"expected an object with one of {_KINDS}, got {shown(value)}")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(where, str(error)) from None
