"""Constraints on output: an object with one field in Python and in batch files, or flags of the terminal tools."""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path

import penstock.v1 as pb
from penstock.clients.errors import InvalidOption, shown

STARTS: Mapping[str, "pb.ConstraintStart.ValueType"] = {
    "after_reasoning": pb.CONSTRAINT_START_AFTER_REASONING,
    "first_token": pb.CONSTRAINT_START_FIRST_TOKEN,
}
"""The contract's values by the names that callers use."""
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
"""The beginning of a rule, within one line: a pattern that spans lines takes hours for a text of empty lines."""
_KINDS = "json_schema, any_json, regex, lark, gbnf, choices or structural_tag_json"


def set_constraint(constraint: pb.Constraint, value: object) -> None:
    """Sets a constraint from an object: ``{"json_schema": ...}`` with a schema or its JSON text, ``{"any_json":
    True}``, ``{"choices": [...]}``, ``{"structural_tag_json": ...}`` with a structural tag or its JSON text, or a text
    for ``regex``, ``lark`` or ``gbnf``. The object may also have ``"start"``: "after_reasoning" (the default) or
    "first_token". Raises InvalidOption."""
    if isinstance(value, Mapping) and "start" in value:
        value = dict(value)
        set_constraint_start(constraint, value.pop("start"), "constraint.start")
    if not isinstance(value, Mapping) or len(value) != 1:
        raise InvalidOption("constraint", f"expected an object with one of {_KINDS}, got {shown(value)}")
    [(kind, given)] = value.items()
    where = f"constraint.{kind}" if isinstance(kind, str) else "constraint"
    try:
        if kind in ("json_schema", "structural_tag_json"):
            setattr(constraint, kind, given if isinstance(given, str) else json.dumps(given, allow_nan=False))
        elif kind == "any_json" and given is True:
            constraint.any_json.SetInParent()
        elif kind == "choices" and not isinstance(given, str):
            constraint.choices.values.extend(given)
        elif kind in ("regex", "lark", "gbnf"):
            setattr(constraint, kind, given)
        else:
            raise InvalidOption("constraint", f"expected an object with one of {_KINDS}, got {shown(value)}")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(where, str(error)) from None


def set_constraint_start(constraint: pb.Constraint, value: object, field: str) -> None:
    """Sets by name where the constraint starts to apply. Raises InvalidOption."""
    if not isinstance(value, str) or value not in STARTS:
        raise InvalidOption(field, f"expected {' or '.join(STARTS)}, got {shown(value)}")
    constraint.start = STARTS[value]


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar that may also be in Lark is GBNF: only that has rules with ``::=``."""
    return _GBNF_RULE.search(grammar) is not None


def add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the mutually exclusive flags for constraints; ``constraint_settings`` reads them."""
    flags = parser.add_argument_group("constraints on answers (at most one; default: none)")
    one = flags.add_mutually_exclusive_group()
    one.add_argument(
        "--json-schema", type=_schema, dest="constraint", metavar="FILE|JSON", help="a JSON schema, or a file with one"
    )
    one.add_argument(
        "--any-json", action="store_const", const={"any_json": True}, dest="constraint", help="any JSON object"
    )
    one.add_argument(
        "--regex",
        type=lambda text: {"regex": text},
        dest="constraint",
        metavar="REGEX",
        help="a regular expression for the whole answer, in Rust's syntax",
    )
    one.add_argument(
        "--grammar", type=_grammar, dest="constraint", metavar="FILE", help="a file with a grammar, in Lark or GBNF"
    )
    one.add_argument(
        "--choice", action="append", metavar="TEXT", help="the answer must be this text, or one of these if repeated"
    )


def constraint_settings(arguments: argparse.Namespace) -> list[tuple[str, object]]:
    """Returns the request option and the value that the flags set, or nothing if no flag was given."""
    if arguments.choice is not None:
        return [("constraint", {"choices": arguments.choice})]
    return [] if arguments.constraint is None else [("constraint", arguments.constraint)]


def _schema(text: str) -> Mapping[str, object]:
    return {"json_schema": text if text.lstrip().startswith("{") else _read(text)}


def _grammar(path: str) -> Mapping[str, object]:
    text = _read(path)
    return {"gbnf" if is_gbnf(text) else "lark": text}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{path} is not a text file") from None
