"""The command ``penstock serve``: its worker's Python gets up on another core while the service imports what it
needs."""

from typing import NoReturn

import msgspec  # noqa: F401 - where the server's packages are missing, that ends it, not the worker

from penstock.models.executor.spawn import spawn


def main(argv: list[str]) -> NoReturn:
    """Serves until it is told to stop, and ends the process with the status."""
    try:
        worker = spawn()
    except OSError:
        worker = None  # the next try will tell why
    # Imported here: this takes as long as the worker does.
    from penstock.service.app.serve import end_process, serve

    end_process(serve(argv, worker=worker))
