"""A plugin of pytest. ``-p gpu_bench.print_failures`` prints the end of each failure at once, so that a run that is cut
short still reports what failed."""

import os

import pytest

LINES = 14


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints it in the process that starts the others, if there are several."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        text = "\n".join(report.longreprtext.splitlines()[-LINES:])
        print(f"\n{report.when} of {report.nodeid} failed:\n{text}", flush=True)
