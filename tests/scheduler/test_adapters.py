"""Requests with adapters on a whole engine: they wait for a slot, outlive an unloading, and end if a load fails."""

import asyncio

import pytest
from known_requests import ENGINE_VOCAB_SIZE, Received, make_request
from waiting import turns, until

from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.adapter_loader import AdapterError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.request import EngineFinishReason
from penstock.scheduler.testing.fake_executor import FakeExecutor


@pytest.fixture
async def start():
    engines = []

    async def start(**options):
        executor = FakeExecutor(vocab_size=ENGINE_VOCAB_SIZE, **{"max_loras": 2, **options})
        engine = Engine(executor, restart_delay_s=0.0)
        engines.append(engine)
        await engine.start()
        added, take = [], executor.submit

        def note(plan):
            added.extend(plan.added)
            take(plan)

        executor.submit = note  # type: ignore[method-assign]
        return engine, executor, added

    yield start
    for engine in engines:
        await engine.stop()


def submit(engine, name, adapter, max_tokens=4):
    request = make_request(name, [1, 2, 3], block_size=16, max_tokens=max_tokens, adapter=adapter)
    received = Received(request, engine.facts.max_model_len, ENGINE_VOCAB_SIZE)
    engine.submit(request)
    return received


async def finish(engine, *received):
    await engine.wait_idle()
    for each in received:
        each.check_end()
        assert each.finished.reason is EngineFinishReason.LENGTH, each.finished


async def test_rows_have_the_slots_of_their_adapters(start):
    engine, executor, added = await start()
    a, b = [await engine.adapters.load(name, f"/{name}") for name in "ab"]
    assert (a.slot, b.slot) == (1, 2)
    assert (a.rank, a.digest) == (8, b"/a")
    await finish(engine, submit(engine, "1", a), submit(engine, "2", None), submit(engine, "3", b))
    assert [row.adapter for row in added] == [1, 0, 2]
    assert [load.slot for load in executor.adapter_loads] == [1, 2]


async def test_five_adapters_share_two_slots(start):
    engine, executor, added = await start()
    adapters = [await engine.adapters.load(name, f"/{name}") for name in "abcde"]
    assert [load.slot for load in executor.adapter_loads] == [1, 2, 0, 0, 0]
    await finish(engine, *(submit(engine, f"{n}", adapters[n % 5]) for n in range(15)))
    assert len(added) == 15
    assert {load.path for load in executor.adapter_loads[5:]} >= {"/c", "/d", "/e"}


async def test_others_go_on_while_one_waits_for_its_adapter(start):
    engine, executor, _ = await start(max_loras=1)
    a, b = [await engine.adapters.load(name, f"/{name}") for name in "ab"]
    executor.may_load.clear()
    waiting = submit(engine, "b", b)
    assert engine.adapters.busy() == ([], ["b"])
    others = [submit(engine, f"{n}", None) for n in range(3)]
    await until(lambda: all(other.finished for other in others))
    assert waiting.finished is None
    late = submit(engine, "a", a)  # its slot is being overwritten
    executor.may_load.set()
    await finish(engine, waiting, late, *others)
    assert executor.adapter_loads[-1].digest == b"/a", "the files must be those that were loaded"


async def test_an_unloaded_adapter_serves_the_requests_that_it_has(start):
    engine, executor, _ = await start(max_loras=1, seconds_per_step=0.001)
    a = await engine.adapters.load("a", "/a")
    running = submit(engine, "1", a, max_tokens=50)
    await until(lambda: running.token_ids)
    engine.adapters.unload(a)
    other = await engine.adapters.load("a", "/other")
    second = submit(engine, "2", other)
    await finish(engine, running, second)
    assert [load.path for load in executor.adapter_loads] == ["/a", "/other", "/other"]


async def test_a_load_that_fails_ends_the_requests_that_wait_for_it(start):
    engine, executor, _ = await start(max_loras=1)
    a, b = [await engine.adapters.load(name, f"/{name}") for name in "ab"]
    executor.load_errors["/b"] = "/b: its files have changed"
    failing, other = submit(engine, "1", b), submit(engine, "2", a)
    await engine.wait_idle()
    assert failing.finished.reason is EngineFinishReason.ADAPTER_FAILED
    assert failing.finished.message == "/b: its files have changed"
    await finish(engine, other)
    with pytest.raises(AdapterError, match="have changed"):
        await engine.adapters.load("again", "/b")


async def test_adapters_are_loaded_again_after_a_restart(start):
    engine, executor, _ = await start(seconds_per_step=0.001)
    a, b = [await engine.adapters.load(name, f"/{name}") for name in "ab"]
    requests = [submit(engine, "1", a, max_tokens=30), submit(engine, "2", b, max_tokens=30)]
    await until(lambda: all(request.token_ids for request in requests))
    executor.die()
    await finish(engine, *requests)
    assert sorted(load.path for load in executor.adapter_loads) == ["/a", "/a", "/b", "/b"]


async def test_a_load_for_an_operator_fails_with_the_worker(start):
    engine, executor, _ = await start()
    executor.may_load.clear()
    load = asyncio.ensure_future(engine.adapters.load("a", "/a"))
    await turns()
    executor.die()
    executor.may_load.set()
    with pytest.raises(ExecutorError):
        await load
    await until(lambda: executor.num_starts == 2)
