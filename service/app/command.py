"""The command ``penstock serve``. The worker's Python starts on another core while the service imports its modules."""

from typing import NoReturn

import msgspec  # noqa: F401 - if the server's packages are missing, it fails here, before a worker starts

from penstock.models.executor.spawn import spawn


def main(argv: list[str]) -> NoReturn:
    """Serves until it is stopped, and ends the process with the exit status."""
    try:
        worker = spawn()
    except OSError:
        worker = None  # the next try reports the reason
    # Imported here: this takes as long as the worker's start.
    from penstock.service.app.serve import end_process, serve

    end_process(serve(argv, worker=worker))
