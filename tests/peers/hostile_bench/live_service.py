"""A service to attack, in processes of its own: which of them live, and how much memory each takes."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

VICTIM_KEY, ATTACKER_KEY = "key-of-the-victim", "key-of-the-attacker"
MORE_KEYS = tuple(f"key-of-the-attacker-{number}" for number in range(100))
"""Further keys of the attacker's tenant."""
_SAMPLE_S = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")
KINDS = {"worker": "penstock.models.worker.main", "gateway": "penstock.service.app.http_child"}
"""Child processes that must not be restarted, by a part of their command lines."""
OTHERS = "others"
"""All other children, such as those that check grammars and render templates."""


@dataclass
class LiveService:
    """A service that is ready."""

    process: "subprocess.Popen[str]"
    grpc: str
    http: str
    metrics: str
    log: Path

    def processes(self) -> dict[int, str]:
        """Its processes by id, each with its kind."""
        found = {self.process.pid: "service"}
        for pid in _descendants(self.process.pid):
            line = _text(f"/proc/{pid}/cmdline")
            found[pid] = next((kind for kind, part in KINDS.items() if part in line), OTHERS)
        return found

    def log_bytes(self) -> int:
        """How much it has logged."""
        return self.log.stat().st_size


@contextmanager
def live_service(
    directory: Path, flags: Sequence[str] = (), max_open_files: int | None = None
) -> Iterator[LiveService]:
    """Starts a service with two tenants, the gRPC port, the HTTP gateway and the metrics page."""
    keys = directory / "keys"
    named = [(VICTIM_KEY, "victim"), *((key, "attacker") for key in (ATTACKER_KEY, *MORE_KEYS))]
    keys.write_text("".join(f"sha256:{sha256(key.encode()).hexdigest()} {name}\n" for key, name in named))
    ports = [_free_port() for _ in range(3)]
    grpc, http, metrics = (f"127.0.0.1:{port}" for port in ports)
    command = [str(Path(sys.executable).with_name("penstock")), "serve", f"--api-keys-file={keys}"]
    command += [f"--port={ports[0]}", f"--http-port={ports[1]}", f"--metrics-listen={metrics}", "--admin-listen=off"]
    command += ["--log-level=warning", "--tool-call-parser=hermes", *flags]
    if max_open_files is not None:
        command = ["sh", "-c", f'ulimit -n {max_open_files}; exec "$@"', "sh", *command]
    log_path = directory / "log"
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        if not re.match("penstock .* serves", first):
            raise RuntimeError(f"the service did not start: {log_path.read_text()[-500:]}")
        yield LiveService(process, grpc, http, metrics, log_path)
    finally:
        process.kill()
        process.communicate()


@dataclass
class MemoryWatch:
    """Samples the memory of a service's processes in a thread."""

    service: LiveService
    peak_bytes: Counter[str] = field(default_factory=Counter)
    """The most that each kind of process took."""
    peak_total_bytes: int = 0
    """The most that all of them took at the same time."""

    def __enter__(self) -> "MemoryWatch":
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            now: Counter[str] = Counter()
            for pid, kind in self.service.processes().items():
                now[kind] += _resident(pid)
            self.peak_bytes |= now
            self.peak_total_bytes = max(self.peak_total_bytes, now.total())
            if self._over.wait(_SAMPLE_S):
                return


def restarts(before: dict[int, str], after: dict[int, str]) -> list[str]:
    """The kinds of processes that ended in between, except those that may."""
    return [kind for pid, kind in before.items() if kind != OTHERS and after.get(pid) != kind]


def _resident(pid: int) -> int:
    fields = _text(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in _text(task).split()]
    return children + [each for child in children for each in _descendants(child)]


def _text(path: "str | Path") -> str:
    try:
        return Path(path).read_text()
    except OSError:  # the process has ended
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
