"""Fixtures of the clients' tests: a fake service, and the command ``penstock`` as a process or on a terminal."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import ExitStack

import psutil
import pytest
from fake_service import FakeAdmin, FakeService


class Tool:
    """The command ``penstock``, in a process of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")} | environment
        self.command = [
            sys.executable,
            "-P",
            "-c",
            "import sys; from penstock.clients.cli.main import main; sys.exit(main())",
        ]

    def start(self, *arguments: object, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) -> subprocess.Popen[bytes]:
        command = [*self.command, *map(str, arguments)]
        return subprocess.Popen(command, env=self.environment, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE)

    def run(self, *arguments: object, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """With this text on standard input, or nothing there."""
        command = [*self.command, *map(str, arguments)]
        return subprocess.run(
            command,
            check=False,
            env=self.environment,
            input=text or "",
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )


class Terminal:
    """A person at a terminal."""

    def __init__(self, tool: Tool, *arguments: object) -> None:
        self._side, other = pty.openpty()
        termios.tcsetwinsize(other, (30, 100))
        command = [*tool.command, *map(str, arguments)]
        environment = tool.environment | {"TERM": "dumb", "NO_COLOR": tool.environment.get("NO_COLOR", "1")}
        for size in ("COLUMNS", "LINES"):  # pytest-xdist sets them
            environment.pop(size, None)
        self.process = subprocess.Popen(
            command, env=environment, stdin=other, stdout=other, stderr=other, start_new_session=True, close_fds=True
        )
        os.close(other)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def wait_for(self, text: str) -> str:
        """Reads until this is on the screen, and forgets what came before."""
        assert self._shows(text, 120), self.seen
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt(self, text: str) -> None:
        """Presses Ctrl-C and waits until this is on the screen. A prompt misses a Ctrl-C that comes just before it
        begins to wait, so the key is pressed while the program sleeps, and again if it sleeps on."""
        while text not in self.seen:
            if psutil.Process(self.process.pid).status() == psutil.STATUS_SLEEPING:
                os.kill(self.process.pid, signal.SIGINT)
            self._shows(text, 1)
        self.wait_for(text)

    def _shows(self, text: str, seconds: float) -> bool:
        give_up = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < give_up:
            if select.select([self._side], [], [], 0.1)[0]:
                self.seen += os.read(self._side, 4096).decode()
        return text in self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._side)

    def end(self) -> int:
        """Reads to the end, and returns the exit status."""
        with contextlib.suppress(OSError):  # how Linux tells that the other side is closed
            while os.read(self._side, 4096):
                pass
        return self.process.wait(120)


@pytest.fixture
def tool() -> Tool:
    """Runs ``penstock``; no service is named in its environment."""
    return Tool({"PYTHONWARNINGS": "error"})


@pytest.fixture
def open_terminal(tool):
    """Runs ``penstock`` on a terminal."""
    with ExitStack() as stack:

        def start(*arguments: object) -> Terminal:
            terminal = Terminal(tool, *arguments)
            stack.callback(terminal.close)
            return terminal

        yield start


@pytest.fixture
async def service():
    """On the test's own loop."""
    async with FakeService().serving() as fake:
        yield fake


@pytest.fixture
def threaded_service():
    """On a thread, for tests without a loop."""
    with FakeService().on_a_thread() as fake:
        yield fake


@pytest.fixture
def admin(monkeypatch):
    """An administration, which the environment names."""
    with FakeAdmin().serving() as fake:  # type: ignore[abstract]
        monkeypatch.setenv("PENSTOCK_ADMIN", fake.target)
        yield fake


@pytest.fixture
def new_service() -> type[FakeService]:
    """For tests that start and stop it themselves."""
    return FakeService
