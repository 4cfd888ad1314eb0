"""When the cycle collector runs."""

import asyncio
import gc

import pytest
from waiting import until

from penstock.clients.host import event_loop
from penstock.clients.host.event_loop import COLLECT_AFTER_BYTES, MemoryWatch


class Process:
    """As large as it is told to be; a collection frees what is garbage."""

    def __init__(self) -> None:
        self.num_bytes = 1 << 30
        self.garbage = 0
        self.num_collections = 0
        self.num_trims = 0

    def size(self) -> int:
        return self.num_bytes

    def grow(self, num_bytes: int, garbage: int = 0) -> None:
        self.num_bytes += num_bytes
        self.garbage += garbage

    def trim(self) -> None:
        self.num_trims += 1

    def collect(self) -> None:
        self.num_bytes -= self.garbage
        self.garbage = 0
        self.num_collections += 1


@pytest.fixture
async def process(monkeypatch):
    process = Process()
    monkeypatch.setattr(event_loop, "process_bytes", process.size)
    monkeypatch.setattr(event_loop, "_trim_heap", process.trim)
    monkeypatch.setattr(gc, "collect", process.collect)
    return process


@pytest.fixture
async def watch(process):
    watch = MemoryWatch()
    watch.start(asyncio.get_running_loop())
    yield watch
    watch.stop()


async def test_it_collects_each_time_that_the_process_has_grown_enough(process, watch):
    for number in range(3):
        process.grow(COLLECT_AFTER_BYTES - 1)
        watch.check()
        assert process.num_collections == number
        process.grow(1)
        watch.check()
        assert process.num_collections == number + 1
    watch.check()
    assert process.num_collections == 3


async def test_growth_counts_from_the_least_that_there_was(process, watch):
    process.grow(-COLLECT_AFTER_BYTES)
    watch.check()
    process.grow(COLLECT_AFTER_BYTES)
    watch.check()
    assert process.num_collections == 1


async def test_garbage_is_not_taken_for_what_is_needed(process, watch):
    process.grow(COLLECT_AFTER_BYTES, garbage=COLLECT_AFTER_BYTES)
    watch.check()
    process.grow(COLLECT_AFTER_BYTES - 1)
    watch.check()
    assert process.num_collections == 1


async def test_what_is_free_goes_back_to_the_system_now_and_then(process, watch, monkeypatch):
    process.grow(COLLECT_AFTER_BYTES)
    watch.check()
    await until(lambda: process.num_trims == 1)
    process.grow(COLLECT_AFTER_BYTES)
    watch.check()
    await asyncio.sleep(0.01)
    assert process.num_trims == 1  # it has just been done
    monkeypatch.setattr(event_loop, "TRIM_INTERVAL_S", 0.0)
    watch.check()
    await until(lambda: process.num_trims == 2)
    watch.check()
    await asyncio.sleep(0.01)
    assert process.num_trims == 2


async def test_it_looks_by_itself_until_it_is_stopped(process, monkeypatch):
    monkeypatch.setattr(event_loop, "CHECK_INTERVAL_S", 0.001)
    watch = MemoryWatch()
    watch.start(asyncio.get_running_loop())
    process.grow(COLLECT_AFTER_BYTES)
    await until(lambda: process.num_collections)
    watch.stop()
    watch.stop()
    process.grow(COLLECT_AFTER_BYTES)
    await asyncio.sleep(0.01)
    assert process.num_collections == 1


async def test_another_system_goes_without(monkeypatch, tmp_path):
    monkeypatch.setattr(event_loop, "_MEMORY", tmp_path / "none")
    watch = MemoryWatch()
    watch.start(asyncio.get_running_loop())
    watch.stop()


def test_the_process_itself_is_looked_at():
    assert event_loop.process_bytes() > 1 << 20
