"""Starts a worker's process, of which nobody knows yet what it will load. Imports next to nothing, so that the service
can have one get up while it gets up itself."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.models.executor.child_process import child_environment

UNINTERRUPTED = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
"""A terminal interrupts every process at once; one that imports would tell it as a traceback."""
WORKER = f"{UNINTERRUPTED}; from penstock.models.worker.main import main; main()"
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
"""Compute threads that wait for each other sleep instead of spinning: where the service's loop or anything else shares
their cores, spinning was seen to cost nine tenths of the speed. Nor does a tokenizer have threads."""


@dataclass(frozen=True)
class Spawned:
    """A worker's process that has not been told its config, and our end of the socket that it listens to."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket

    def drop(self) -> None:
        """Ends it."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def spawn(env: Mapping[str, str] | None = None) -> Spawned:
    """Starts one, with these variables besides those that it needs of the service's. It ends with the thread that
    started it. Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", WORKER, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**QUIET, **child_environment(os.environ), **(env or {})},
            )
    except OSError:
        ours.close()
        raise
    return Spawned(process, ours)
