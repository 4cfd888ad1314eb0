"""A private service: ``penstock serve`` as a child process on a private Unix socket, for as long as it is needed.

For library use and batch jobs. The child has its own session, so Ctrl-C reaches only its parent. It ends when the pipe
from its parent closes, so neither the child nor its directory is left behind.
"""

import itertools
import json
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from penstock.clients.errors import PenstockError
from penstock.service.config.command_line import PROGRAM, parse_config
from penstock.service.config.flags import ConfigError
from penstock.service.private_directory import private_directory

_CHILD = "import sys; from penstock.service.app.embedded import main; main(*sys.argv[1:])"
_END_TIMEOUT_S = 15.0
_TICK_S = 0.1
_NOT_FOR_LOCAL = ("--config", "--host", "--listen", "--model", "--port")


class LocalServiceError(PenstockError):
    """The service could not be started. The text is the one line that ``penstock serve`` printed."""


@contextmanager
def local_service(model: str = "demo", *written: str, **flags: object) -> Iterator[str]:
    """Starts a service and yields its target. ``flags`` are those of ``penstock serve``, such as ``max_num_seqs=64``;
    ``written`` are more of them, as on a command line.

    Raises LocalServiceError. On exit the service ends, even if requests are running.
    """
    arguments = [f"--model={model}", *_arguments(written, flags)]
    try:
        parse_config(arguments)
    except ConfigError as error:
        raise LocalServiceError(str(error)) from None
    with private_directory() as directory:
        target = f"unix:{directory / 'socket'}"
        log = directory / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, directory, *arguments, f"--listen={target}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        try:
            _wait(process, model, log)
            yield target
            if process.poll() is not None:
                sys.stderr.write(f"the service of {model} ended unexpectedly: {_last_words(log)}\n")
        finally:
            _end(process)


def main(directory: str, *arguments: str) -> NoReturn:
    """Runs the service in the child until its standard input ends. Then the parent may be gone, so the child removes
    ``directory``."""
    from penstock.service.app.serve import end_process, serve

    lifeline = sys.stdin.fileno()
    status = serve(list(arguments), lifeline)
    if select.select([lifeline], [], [], 0)[0]:
        shutil.rmtree(directory, ignore_errors=True)
    end_process(status)


def _arguments(written: Sequence[str], flags: dict[str, object]) -> list[str]:
    """Returns the flags of the child's command line. Raises LocalServiceError for one that it cannot have."""
    arguments: list[str] = []
    for name, value in {"admin_listen": "off", "log_level": "warning", **flags}.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            arguments.append(flag.replace("--", "--no-", 1))
        elif value is True:
            arguments.append(flag)
        elif isinstance(value, Mapping):
            arguments.append(f"{flag}={json.dumps(value)}")
        elif value is not None:
            arguments.append(f"{flag}={value}")
    arguments += written
    for flag in (argument.partition("=")[0] for argument in arguments):
        if flag in _NOT_FOR_LOCAL:
            raise LocalServiceError(f"{flag}: a private service has its own socket and no configuration file; omit it")
    return arguments


def _wait(process: "subprocess.Popen[bytes]", model: str, log: Path) -> None:
    """Waits until the child serves: then it writes its first line to its standard output."""
    assert process.stdout is not None
    began = time.monotonic()
    shows = sys.stderr.isatty()
    for sign in itertools.cycle("|/-\\"):
        if shows:
            sys.stderr.write(f"\r{sign} loading {model}: {time.monotonic() - began:.0f} s")
            sys.stderr.flush()
        if select.select([process.stdout], [], [], _TICK_S)[0]:
            break
    if shows:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
    if not process.stdout.readline():
        process.wait()
        raise LocalServiceError(_last_words(log))


def _last_words(log: Path) -> str:
    """Returns the child's error message: penstock's own last line in the log if there is one, else the last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line.removeprefix(f"{PROGRAM}: ") for line in lines if line.startswith(f"{PROGRAM}: ")]
    relevant = [line for line in own if not line.startswith("loading ")]
    return (relevant or lines or ["its log is empty"])[-1]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the child, by SIGTERM and SIGKILL if it takes too long, and reaps it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    for harder in (process.terminate, process.kill):
        try:
            process.wait(_END_TIMEOUT_S)
            return
        except subprocess.TimeoutExpired:
            harder()
    process.wait()
