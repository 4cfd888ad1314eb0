"""Starts a worker's process before its config is known. Imports very little, so that the worker can start up while the
service does."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from penstock.models.executor.child_process import child_environment

UNINTERRUPTED = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
"""A terminal interrupts every process at once; one that is importing would print a traceback."""
WORKER = f"{UNINTERRUPTED}; from penstock.models.worker.main import main; main()"
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
"""Compute threads that wait for each other sleep instead of spinning: where they shared cores with the service's loop
or other processes, spinning cost nine tenths of the speed. Tokenizers use no threads either."""


@dataclass(frozen=True)
class Spawned:
    """A worker's process that has not received its config, and the service's end of its socket."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket

    def drop(self) -> None:
        """Ends the process."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def spawn() -> Spawned:
    """Starts a worker's process, with the part of the service's environment that it needs. It ends with the thread that
    started it. Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", WORKER, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**QUIET, **child_environment(os.environ)},
            )
    except OSError:
        ours.close()
        raise
    return Spawned(process, ours)
