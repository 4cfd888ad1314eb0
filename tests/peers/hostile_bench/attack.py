"""What an attacker is told, and what it counts."""

import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

PAUSE_S = 0.01
"""After an answer, so that an attack is not just another program that uses a core."""


@dataclass
class Attack:
    """The addresses and the time of an attack, and its answers by code."""

    grpc: str
    http: str
    metrics: str
    seconds: float
    num_calls: int = 0
    num_bytes: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.seconds

    @property
    def is_on(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self._until

    @property
    def left_s(self) -> float:
        """How much time is left."""
        return max(0.0, self._until - time.monotonic())

    def count(self, num_bytes: int, answer: str) -> None:
        """Counts a call, what was sent for it, and its answer."""
        self.num_calls += 1
        self.num_bytes += num_bytes
        self.answers[answer] += 1


def connect(target: str, receive_bytes: int | None = None) -> socket.socket:
    """Opens a TCP connection; ``receive_bytes`` limits what the kernel takes for us. Raises OSError."""
    host, _, port = target.rpartition(":")
    connection = socket.socket()
    try:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(2)
        connection.connect((host, int(port)))
    except OSError:
        connection.close()
        raise
    return connection


def run_threads(work: Callable[[int], None], number: int) -> None:
    """Runs ``work`` in threads, each with its index, and waits for them."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def allow_many_files() -> None:
    """Raises the soft limit of open files to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
