"""Flags as fields of a frozen dataclass: a command line, the environment, a file and Python set the same fields, with
the same bounds.

This module knows no flag by name.
"""

import argparse
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import yaml

from penstock.clients.cli.command_parser import misspelt, nearest, shortened

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_SWITCHES = {"true": True, "false": False, "1": True, "0": False, "on": True, "off": False, "yes": True, "no": False}
"""The values of a variable for a flag that is on or off, in any case."""


class ConfigError(argparse.ArgumentTypeError):
    """A flag, a key or its value is wrong. The text is one line with its name and a correct value. If the parser of a
    value raises it, argparse adds the flag's name."""

    def __init__(self, text: str) -> None:
        super().__init__(shortened(text))


def flag(
    default: Any, text: str, *, metavar: str | None = None, low: float | None = None, high: float | None = None,
    choices: Sequence[str | int] | None = None, shown: str | None = None, is_size: bool = False, is_json: bool = False,
    group: str = "",
) -> Any:  # fmt: skip
    """Returns a field with its flag's properties. ``low`` and ``high`` are inclusive. The help shows ``shown`` as the
    default, and ``group`` starts a group of flags. In a file, the value of an ``is_json`` flag may be a mapping."""
    return dataclasses.field(
        default=default,
        metadata={
            "help": text, "metavar": metavar, "low": low, "high": high, "choices": choices, "shown": shown,
            "is_size": is_size, "is_json": is_json, "group": group,
        },
    )  # fmt: skip


def read_file(path: Path, of: "type[DataclassInstance]", listed: str) -> dict[str, Any]:
    """Returns the values of a YAML file that has flags' names as keys. ``listed`` is the end of an error: where flags
    are listed. Raises ConfigError."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: is not valid YAML ({' '.join(str(error).split())}); correct it") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: must contain keys and values, such as port: 50051")
    fields = {_name(field): field for field in dataclasses.fields(of)}
    values = {}
    for key, value in loaded.items():
        field = fields.get(f"--{str(key).replace('_', '-')}")
        if field is None:
            hint = _hint(str(key).replace("_", "-"), [name.removeprefix("--") for name in fields])
            raise ConfigError(f"--config {path}: {key} is not a flag{hint}; {listed}")
        try:
            values[field.name] = _from_file(field, value)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"--config {path}: {key}: {error}") from None
    return values


def read_environment(
    environment: Mapping[str, str], prefix: str, of: "type[DataclassInstance]", listed: str
) -> tuple[dict[str, Any], str | None]:
    """Returns the values of the variables that are named ``prefix`` and a flag in capitals, such as PREFIX_PORT, and
    the path of a file from PREFIX_CONFIG. An empty variable counts as not set. ``listed`` is the end of an error: where
    flags are listed. Raises ConfigError."""
    fields = {f"{prefix}{field.name.upper()}": field for field in dataclasses.fields(of)}
    texts = {name: text for name, text in environment.items() if name.startswith(prefix) and text}
    file = texts.pop(f"{prefix}CONFIG", None)
    values = {}
    for name, text in texts.items():
        field = fields.get(name)
        if field is None:
            raise ConfigError(f"{name} in the environment is not a flag{_hint(name, fields)}; {listed}")
        try:
            values[field.name] = _from_text(field, text)
        except ConfigError as error:
            # Kubernetes sets NAME_PORT=tcp://... in every pod for each Service NAME.
            hint = "; set enableServiceLinks: false in the pod's spec" if text.startswith("tcp://") else ""
            raise ConfigError(f"{name} in the environment: {error}{hint}") from None
    return values, file


def _hint(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else ""


def _from_text(field: "dataclasses.Field[Any]", text: str) -> Any:
    if bool not in _types(field):
        return _parse(field, text)
    if text.lower() not in _SWITCHES:
        raise ConfigError(f"must be {_one_of(list(_SWITCHES))}; it is {text!r}")
    return _SWITCHES[text.lower()]


def _from_file(field: "dataclasses.Field[Any]", value: object) -> Any:
    is_switch = bool in _types(field)
    if is_switch and isinstance(value, bool):
        return value
    if field.metadata["is_json"] and isinstance(value, dict):
        return json.dumps(value, default=str)
    if is_switch or isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"must be {_wanted(field)}; it is {value!r}")
    return _parse(field, str(value))


def _parse(field: "dataclasses.Field[Any]", text: str) -> Any:
    """Returns the value of a text. Raises ConfigError."""
    types = _types(field)
    try:
        if field.metadata["is_size"]:
            return _size(text)
        for kind in (int, float):
            if kind in types:
                return kind(text)
    except ValueError:
        raise ConfigError(f"must be {_wanted(field)}; it is {text!r}") from None
    return Path(text).expanduser() if Path in types else text


def check(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Raises ConfigError if a value is not of its field's type, or is out of its bounds."""
    kinds = (*_types(field), int) if float in _types(field) else _types(field)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{_name(field)}: must be {_wanted(field)}; it is {value!r}")
    low, high, choices = (field.metadata[name] for name in ("low", "high", "choices"))
    below, above = low is not None and not value >= low, high is not None and not value <= high
    if below or above:
        bounds = f"{low:,} to {high:,}" if high is not None else f"at least {low:,}"
        raise ConfigError(f"{_name(field)}: must be {bounds}; it is {value:,}")
    if choices is not None and value not in choices:
        raise ConfigError(f"{_name(field)}: must be {_one_of(choices)}; it is {value!r}")


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([KMGT]?)(iB|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError
    return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")


def _types(field: "dataclasses.Field[Any]") -> tuple[Any, ...]:
    return tuple(kind for kind in get_args(field.type) or (field.type,) if kind is not type(None))


def _wanted(field: "dataclasses.Field[Any]") -> str:
    if field.metadata["choices"] is not None:
        return _one_of(field.metadata["choices"])
    if field.metadata["is_size"]:
        return "a number of bytes, such as 512M"
    if bool in _types(field):
        return "true or false"
    kinds = {int: "a whole number", float: "a number", Path: "a path"}
    return next((text for kind, text in kinds.items() if kind in _types(field)), "text")


def _one_of(choices: Sequence[object]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def _name(field: "dataclasses.Field[Any]") -> str:
    return f"--{field.name.replace('_', '-')}"


class FlagParser(argparse.ArgumentParser):
    """Raises ConfigError, with one line, instead of printing usage. Its results lack flags that are not given."""

    def __init__(self, listed: str, **settings: Any) -> None:
        """``listed`` is the end of an error: where flags are listed."""
        super().__init__(argument_default=argparse.SUPPRESS, allow_abbrev=False, **settings)
        self._listed = listed

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        unknown = text.removeprefix("unrecognized arguments")
        if unknown == text:
            raise ConfigError(text)
        near = misspelt(unknown.removeprefix(":").split(), self._option_string_actions)
        hint = f"; did you mean {' and '.join(dict.fromkeys(near.values()))}?" if near else ""
        raise ConfigError(f"no such flag or argument{shortened(unknown)}{hint}; {self._listed}")

    def add_fields(self, of: "type[DataclassInstance]", positional: str) -> None:
        """Adds a flag for each field, in the groups that fields start. ``positional`` is the one that needs no flag."""
        for field in dataclasses.fields(of):
            if field.metadata["group"]:
                flags = self.add_argument_group(field.metadata["group"])
            text = field.metadata["help"]
            shown = field.metadata["shown"] or field.default
            if field.name == positional:
                name = field.name.upper()
                flags.add_argument(field.name, nargs="?", metavar=name, help=f"{text} (default: {shown})")
                flags.add_argument(_name(field), dest=f"{field.name}_flag", metavar=name, help="the same, as a flag")
            elif bool in _types(field):
                help_text = f"{text} (default: {'on' if shown else 'off'})"
                flags.add_argument(_name(field), action=argparse.BooleanOptionalAction, help=help_text)
            else:
                choices = field.metadata["choices"]
                metavar = field.metadata["metavar"] or (f"{{{','.join(map(str, choices))}}}" if choices else None)
                help_text = f"{text} (default: {shown})"
                flags.add_argument(_name(field), type=functools.partial(_parse, field), metavar=metavar, help=help_text)
        flags.add_argument("--config", metavar="FILE", help="a YAML file with flags (default: none)")
