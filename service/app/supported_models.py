"""The command ``penstock models``: the lines of models that can be served."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator

from penstock.models.architecture.lines import COLUMNS, LINES, matrix

_EXAMPLES = """examples:
  penstock models               every line of models, and what of it is not served
  penstock models gemma         only lines whose name or architectures contain this
  penstock models --json | jq   for programs
"""
_INDENT = "    "


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="penstock models",
        description="Lists the lines of models that penstock serves.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("text", nargs="?", default="", help="part of a name or an architecture, in any case")
    parser.add_argument("--json", action="store_true", help="print an array of objects")
    return parser


def main(argv: list[str]) -> int:
    """Prints the lines; returns 1 if none contains the text."""
    args = make_parser().parse_args(argv)
    rows = [row for row in matrix() if args.text.lower() in f"{row[0]} {row[1]}".lower()]
    if args.json:
        output = json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], indent=2)
    else:
        output = "\n".join(line for row in rows for line in _described(row))
    sys.stdout.write(f"{output}\n" if output else "")
    if not rows:
        sys.stderr.write(
            f"penstock models: none of {len(LINES)} lines has {args.text!r} in its name or architectures\n"
        )
    return 0 if rows else 1


def _described(row: tuple[str, ...]) -> Iterator[str]:
    width = max(40, shutil.get_terminal_size().columns)
    yield row[0]
    for name, value in zip(COLUMNS[1:], row[1:], strict=True):
        if value:
            yield textwrap.fill(f"{name}: {value}", width, initial_indent=_INDENT, subsequent_indent=_INDENT * 2)
