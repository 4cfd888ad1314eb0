"""A plugin of pytest. ``-p gpu_bench.print_failures`` prints the end of each failure at once, so that a run that is cut
short still reports what failed.

A kernel that accesses memory it must not access makes every later CUDA call of its process fail. The test that launched
it fails, and its process ends, so that pytest-xdist starts another one for the tests that remain."""

import os
from collections.abc import Generator

import pytest
import torch

LINES = 14


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Waits for the test's kernels, whose errors are reported late."""
    yield
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints it in the process that starts the others, if there are several."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        text = "\n".join(report.longreprtext.splitlines()[-LINES:])
        print(f"\n{report.when} of {report.nodeid} failed:\n{text}", flush=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """Ends a process whose CUDA context is lost, once its reports are sent."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)
