"""What ``penstock serve --http-port`` runs as its child: ``penstock gateway``, which ends with its parent.

The end of its standard input is the end of its parent, however that came: then nobody else is left to remove the
directory of the socket between the two.
"""

import os
import shutil
import signal
import sys
import threading
from typing import NoReturn

from penstock.clients.cli.main import main as penstock
from penstock.models.executor.child_process import FED_BY_STRANGERS, prepare_child

PARENT_IS_GONE = 1


def main(directory: str, *arguments: str) -> NoReturn:
    """Runs the gateway with ``arguments``; ``directory`` goes when the parent does."""
    # Who sends SIGTERM to all processes of a service, as systemd does, means the service: it says with SIGINT when the
    # gateway is to end. Threads inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    prepare_child(FED_BY_STRANGERS)
    threading.Thread(target=_end_with_parent, args=(directory,), daemon=True, name="parent").start()
    sys.exit(penstock(["gateway", *arguments]))


def _end_with_parent(directory: str) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(PARENT_IS_GONE)
