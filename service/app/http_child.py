"""A child process of ``penstock serve`` that serves HTTP: ``penstock gateway`` or ``penstock status-page``. It ends
with its parent.

Its standard input ends when its parent does, for whatever reason. Then the child removes the directory of the socket
between the two.
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
    """Runs ``penstock`` with ``arguments``. Removes ``directory`` if the parent ends."""
    # systemd sends SIGTERM to all processes of a service. Only the service acts on it: it ends this process by
    # SIGINT when it is time. Threads inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    prepare_child(FED_BY_STRANGERS)
    threading.Thread(target=_end_with_parent, args=(directory,), daemon=True, name="parent").start()
    sys.exit(penstock(list(arguments)))


def _end_with_parent(directory: str) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(PARENT_IS_GONE)
