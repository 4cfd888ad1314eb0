"""``penstock completion``: completes commands, flags and their values in a shell.

The shell runs ``penstock`` with the line in its environment, and ``complete`` writes what may come next. It imports no
command to complete a command's name, and only the flags of one command to complete its arguments.
"""

import argparse
import os
import re
from collections.abc import Iterable, Iterator
from glob import escape, glob
from pathlib import Path
from pkgutil import resolve_name

from argcomplete import autocomplete
from argcomplete.completers import BaseCompleter
from argcomplete.lexers import split_line
from argcomplete.shell_integration import shellcode

from penstock.clients.cli.command_parser import CommandParser
from penstock.clients.cli.commands import COMMANDS

PROGRAM = "penstock"
SHELLS = ("bash", "zsh", "fish")
_PATH = re.compile("FILE|PATH|[A-Z]+[.](jsonl|png)")
"""Names of values that are paths, as the help shows them."""
_LITERAL = re.compile("[a-z0-9][a-z0-9_-]*")
_EPILOG = """\
to install it, for your user:
  penstock completion bash > ~/.local/share/bash-completion/completions/penstock    (create the folder first)
  penstock completion zsh > ~/.zfunc/_penstock     and in ~/.zshrc, before compinit: fpath=(~/.zfunc $fpath)
  penstock completion fish > ~/.config/fish/completions/penstock.fish

to try it in this shell only:
  source <(penstock completion bash)         or zsh, after compinit
  penstock completion fish | source

The script calls the installed penstock, so it need not be printed again after an update.
"""


def main(argv: list[str]) -> int:
    """Prints the script for a shell."""
    shell = make_parser().parse_args(argv).shell
    # Without readline's own completion, which would offer files where none is wanted.
    print(shellcode([PROGRAM], use_defaults=False, shell=shell))
    return 0


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser("completion", "Prints a script with which a shell completes commands and flags.", _EPILOG)
    parser.add_argument("shell", choices=SHELLS, help="the shell that runs the script")
    return parser


def complete() -> int:
    """Writes completions of the line in the environment to the descriptor that the script opened, and ends the process.
    Returns an exit status if the line is not valid."""
    line, point = os.environ["COMP_LINE"], os.environ.get("COMP_POINT", "")
    words = split_line(line, int(point) if point.isdecimal() else len(line))[3]
    name = words[1] if len(words) > 1 else ""
    autocomplete(
        _parser(name),
        always_complete_options="long" if name in COMMANDS else False,
        default_completer=_Values(),
    )
    return 1


def _parser(name: str) -> argparse.ArgumentParser:
    """Returns a parser of all commands, in which only the command ``name`` has flags."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False)
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for each, command in COMMANDS.items():
        commands.add_parser(each, help=command.summary)
    if name in COMMANDS:
        try:
            commands.choices[name] = resolve_name(COMMANDS[name].parser_entry)()
        except ModuleNotFoundError:  # a package that the command imports is not installed
            commands.choices[name] = argparse.ArgumentParser(add_help=False)
    return parser


class _Values(BaseCompleter):
    """Completes the values of a flag or argument from their form in the help: ``{cpu,cuda}`` or ``auto|none|PATH``."""

    def __call__(
        self, *, prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, parsed_args: argparse.Namespace
    ) -> Iterable[str]:
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        forms = re.split("[{}|,]", metavar)
        yield from (form for form in forms if _LITERAL.fullmatch(form))
        if action.type is Path or any(map(_PATH.fullmatch, forms)):
            yield from _paths(prefix)
        elif "MODEL" in forms:
            yield from (path for path in _paths(prefix) if path.endswith("/"))


def _paths(prefix: str) -> Iterator[str]:
    """Yields the paths that begin with ``prefix``; those of directories end with a slash."""
    folder, start = os.path.split(prefix)
    found_in = os.path.expanduser(folder)
    for name in sorted(glob(f"{escape(start)}*", root_dir=found_in)):
        yield os.path.join(folder, name) + ("/" if os.path.isdir(os.path.join(found_in, name)) else "")
