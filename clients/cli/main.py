"""The command ``penstock``: imports a subcommand only when it runs, so that the bare install can run commands that need
no server, and ``penstock --help`` is fast."""

import contextlib
import difflib
import os
import sys
from collections.abc import Callable
from pkgutil import resolve_name

from penstock.clients.cli.commands import COMMANDS, Command
from penstock.clients.host.distribution import install_command, installed_version

USAGE_ERROR, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
"""Exit statuses besides 0 and 1, as in shells."""


_EXAMPLES = """\
examples:
  penstock serve                       the built-in demo model on 127.0.0.1:50051
  penstock serve Qwen/Qwen3-0.6B       a model from the Hugging Face Hub
  penstock gateway                     OpenAI's HTTP API for that service, at http://127.0.0.1:8000/v1
  penstock chat                        chat with the served model
  penstock chat --once "Say hello."    one question, one answer
  penstock generate demo --input in.jsonl --output out.jsonl
  penstock COMMAND --help              all flags of a command
"""


def main(argv: list[str] | None = None) -> int:
    """Runs ``penstock`` with these arguments, or those of the process, and returns the exit status."""
    _open_missing_streams()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the library's log of its connections is noise on a terminal
    if "_ARGCOMPLETE" in os.environ and "COMP_LINE" in os.environ:  # set by the script of `penstock completion`
        from penstock.clients.cli.completion import complete

        return complete()
    try:
        status = _dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except SystemExit as leaving:  # from argparse, after it printed a message
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return PIPE_CLOSED
    except OSError as error:
        _forget_output()
        return _fail("penstock", f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror))


def _open_missing_streams() -> None:
    """Opens missing standard streams on /dev/null: otherwise the first sockets and files would get their descriptors,
    and log output would go there."""
    for number in range(3):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # child processes need them too
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115


def _forget_output() -> None:
    """Discards unwritten output: the reader is gone, and Python would report an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_help(), end="", file=sys.stderr)
        return USAGE_ERROR
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if name in ("-V", "--version"):
        print(f"penstock {installed_version()}")
        return 0
    if name in COMMANDS:
        return _run(name, COMMANDS[name], rest)
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
    return _fail("penstock", f"unknown command {name}; {hint}", USAGE_ERROR)


def _run(name: str, command: Command, arguments: list[str]) -> int:
    # Imported here: errors imports grpc, which is slow to load, and --help does not need it.
    from penstock.clients.errors import PenstockError

    program = f"penstock {name}"
    try:
        run: Callable[[list[str]], int] = resolve_name(command.entry)
        return run(arguments)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in ("penstock", ""):
            raise
        from penstock.clients.host.machine import has_gpu

        extra = "cuda" if command.extra == "cpu" and has_gpu() else command.extra
        return _fail(program, f"this needs {package}, which is not installed; install it: {install_command(extra)}")
    except PenstockError as error:
        return _fail(program, str(error))


def _fail(program: str, message: str, status: int = 1) -> int:
    from penstock.clients.cli.command_parser import shortened

    try:
        print(f"{program}: {shortened(message)}", file=sys.stderr)
    except OSError:  # the disk is full or the pipe is closed; the exit status still reports the failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "".join(f"  {name:{width}}  {command.summary}\n" for name, command in COMMANDS.items())
    return f"usage: penstock COMMAND [ARGUMENTS]\n\ncommands:\n{rows}\n{_EXAMPLES}"
