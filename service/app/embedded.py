"""A service of this process's own: ``penstock serve`` as a child on a private Unix socket, for as long as it is needed.

For use as a library and for batch jobs. The child has a session of its own, so that Ctrl-C reaches its parent alone,
and a pipe from its parent, whose end is its own end: it cannot be left behind, nor can its directory.
"""

import itertools
import json
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from penstock.clients.errors import PenstockError
from penstock.service.app.private_directory import private_directory
from penstock.service.config.flags import ConfigError
from penstock.service.config.serve_config import PROGRAM, parse_config

_CHILD = "import sys; from penstock.service.app.embedded import main; main(*sys.argv[1:])"
_END_TIMEOUT_S = 15.0
_TICK_S = 0.1
_NOT_FOR_LOCAL = ("config", "host", "listen", "model", "port")


class LocalServiceError(PenstockError):
    """The service could not be started. The text is the one line that ``penstock serve`` said."""


@contextmanager
def local_service(model: str = "demo", **flags: object) -> Iterator[str]:
    """A running service's target. ``flags`` are those of ``penstock serve``, such as ``max_num_seqs=64``.

    Raises LocalServiceError. The service is ended on the way out, whatever still runs on it.
    """
    arguments = _arguments(model, flags)
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
                sys.stderr.write(f"the service of {model} ended by itself: {_last_words(log)}\n")
        finally:
            _end(process)


def main(directory: str, *arguments: str) -> NoReturn:
    """What the child runs: a service that ends when its standard input does. Then its parent may be gone, and nobody
    else be left to remove ``directory``."""
    from penstock.service.app.serve import end_process, serve

    lifeline = sys.stdin.fileno()
    status = serve(list(arguments), lifeline)
    if select.select([lifeline], [], [], 0)[0]:
        shutil.rmtree(directory, ignore_errors=True)
    end_process(status)


def _arguments(model: str, flags: dict[str, object]) -> list[str]:
    """The child's command line, checked here so that a mistake costs no start. Raises LocalServiceError."""
    arguments = [f"--model={model}"]
    for name, value in {"admin_listen": "off", "log_level": "warning", **flags}.items():
        flag = f"--{name.replace('_', '-')}"
        if name in _NOT_FOR_LOCAL:
            raise LocalServiceError(f"{flag}: a service of one's own has a private socket and no file; leave it out")
        if value is False:
            arguments.append(flag.replace("--", "--no-", 1))
        elif value is True:
            arguments.append(flag)
        elif isinstance(value, Mapping):
            arguments.append(f"{flag}={json.dumps(value)}")
        elif value is not None:
            arguments.append(f"{flag}={value}")
    try:
        parse_config(arguments)
    except ConfigError as error:
        raise LocalServiceError(str(error)) from None
    return arguments


def _wait(process: "subprocess.Popen[bytes]", model: str, log: Path) -> None:
    """Until the child serves, which is when it first says something on its standard output."""
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
    """What the child said of its end: its own line if there is one, else the last."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line.removeprefix(f"{PROGRAM}: ") for line in lines if line.startswith(f"{PROGRAM}: ")]
    told = [line for line in own if not line.startswith("loading ")]
    return (told or lines or ["it said nothing"])[-1]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the child, the harder the longer it takes, and reaps it."""
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
