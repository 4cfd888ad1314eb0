"""A service to attack, in processes of its own, and what becomes of them: who lives, and how much memory each takes."""

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

VICTIM_KEY, ATTACKER_KEY = "key-of-the-victim", "key-of-the-attacker"
_SAMPLE_S = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")
KINDS = {"worker": "penstock.models.worker", "gateway": "penstock.service.gateway_child"}
"""Child processes whose end somebody notices, by a part of their command lines."""


@dataclass
class LiveService:
    """One that serves."""

    process: "subprocess.Popen[str]"
    grpc: str
    http: str
    metrics: str

    @property
    def pids(self) -> dict[str, int]:
        """Its processes; of children that are started again, the youngest."""
        found = {"service": self.process.pid}
        for pid in sorted(_children(self.process.pid)):
            line = _text(f"/proc/{pid}/cmdline")
            found |= {kind: pid for kind, part in KINDS.items() if part in line}
        return found


@contextmanager
def live_service(
    directory: Path, flags: Sequence[str] = (), max_open_files: int | None = None
) -> Iterator[LiveService]:
    """Two tenants, the gRPC port, the HTTP gateway and the metrics' page."""
    keys = directory / "keys"
    lines = [f"sha256:{sha256(key.encode()).hexdigest()} {name}\n" for key, name in _TENANTS]
    keys.write_text("".join(lines))
    ports = [_free_port() for _ in range(3)]
    grpc, http, metrics = (f"127.0.0.1:{port}" for port in ports)
    command = [str(Path(sys.executable).with_name("penstock")), "serve", f"--api-keys-file={keys}"]
    command += [f"--port={ports[0]}", f"--http-port={ports[1]}", f"--metrics-listen={metrics}", "--admin-listen=off"]
    command += ["--log-level=error", "--tool-call-parser=hermes", *flags]
    if max_open_files is not None:
        command = ["sh", "-c", f'ulimit -n {max_open_files}; exec "$@"', "sh", *command]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert re.match("penstock .* serves", first), (directory / "log").read_text()
        yield LiveService(process, grpc, http, metrics)
    finally:
        process.kill()
        process.communicate()


_TENANTS = ((VICTIM_KEY, "victim"), (ATTACKER_KEY, "attacker"))


@dataclass
class MemoryWatch:
    """Samples the memory of a service's processes in a thread."""

    service: LiveService
    peak_bytes: dict[str, int] = field(default_factory=dict)
    num_lives: dict[str, int] = field(default_factory=dict)
    """How many processes of each kind there were."""

    def __enter__(self) -> "MemoryWatch":
        self._over = threading.Event()
        self._known: set[int] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for kind, pid in self.service.pids.items():
                if pid not in self._known:
                    self._known.add(pid)
                    self.num_lives[kind] = self.num_lives.get(kind, 0) + 1
                self.peak_bytes[kind] = max(self.peak_bytes.get(kind, 0), _resident(pid))
            if self._over.wait(_SAMPLE_S):
                return


def _resident(pid: int) -> int:
    fields = _text(f"/proc/{pid}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in _text(task).split()]


def _text(path: "str | Path") -> str:
    try:
        return Path(path).read_text()
    except OSError:  # it has ended
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
