"""The KV's memory on CPUs is taken ahead, and out of the way of steps."""

import threading
import time

import pytest
from waiting import wait_until

from penstock.kernels.cpu.program import Memory
from penstock.models.backends.cpu import memory as cpu_pages
from penstock.models.backends.cpu.memory import SLICE_BYTES, FirstPages


class Pages(Memory):
    """Memory that remembers what was taken of it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.taken: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def populate(self, begin: int, num_bytes: int) -> None:
        with self._lock:
            self.taken.append((begin, num_bytes))


@pytest.fixture(autouse=True)
def soon_quiet(monkeypatch):
    monkeypatch.setattr(cpu_pages, "QUIET_S", 0.01)


def test_all_of_it_is_taken_once():
    pages = Pages(40 * SLICE_BYTES + 100)
    FirstPages(pages, 1 << 20).start_prefault()
    wait_until(lambda: len(pages.taken) == 41)
    assert sorted(pages.taken) == [(i * SLICE_BYTES, SLICE_BYTES if i < 40 else 100) for i in range(41)]


def test_no_more_than_the_first_tokens_need():
    first = FirstPages(Pages(1 << 40), page_bytes=1 << 10)
    assert first.num_bytes == (1 << 10) * (1 << 15) // 16
    assert FirstPages(Pages(1 << 40), page_bytes=1 << 30).num_bytes == 4 << 30


def test_nothing_is_taken_while_a_step_is_computed():
    pages = Pages(40 * SLICE_BYTES)
    first = FirstPages(pages, 1 << 20)
    with first.paused():
        first.start_prefault()
        time.sleep(0.1)
        assert not pages.taken
    wait_until(lambda: len(pages.taken) == 40)
