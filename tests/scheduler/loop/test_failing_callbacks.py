"""A request whose text state or sink fails ends and no other does; a sink may change or abort its own request."""

from operator import attrgetter

import pytest
from known_requests import make_config, make_prompt

from penstock.scheduler.config import TenantLimits
from penstock.scheduler.request import (
    Change,
    EngineFinishReason,
    RequestFinished,
    SequenceDelta,
    TextDelta,
)


@pytest.fixture
def world(world_type):
    return world_type(64, make_config())


def test_a_broken_text_state_ends_only_its_request(world, new_request):
    class Broken:
        def feed(self, token_id):
            raise ValueError("no such token")

        def finish(self):
            raise AssertionError("nothing may follow")

        def restart(self):
            pass

    broken = world.add(new_request("broken", make_prompt(5), make_text=Broken))
    whole = world.add(new_request("whole", make_prompt(5, first=2)))
    while world.alive():
        world.schedule()
        world.answer()
        world.check()
    assert broken.finished.reason is EngineFinishReason.INTERNAL
    assert "no such token" not in broken.finished.message
    whole.check_end()


def broken_text():
    raise ValueError("no text")


def test_a_request_without_a_text_leaves_nothing_behind(world_type, new_request):
    world = world_type(100, make_config(tenants={"a": TenantLimits(max_live_requests=1)}))
    with pytest.raises(ValueError, match="no text"):
        world.scheduler.add_request(new_request("broken", make_prompt(8), tenant="a", make_text=broken_text))
    assert not list(world.scheduler.tenants)
    assert world.scheduler.explain("broken") is None
    assert world.add(new_request("good", make_prompt(8), tenant="a")) is not None
    world.drain()


class EndlessText:
    """Holds everything back, and cannot let it go."""

    def feed(self, token_id):
        return TextDelta(0, "")

    def finish(self):
        raise ValueError("no text")

    def restart(self):
        pass


def test_a_text_that_cannot_be_cut_ends_only_its_request(world_type, new_request):
    world = world_type(100, make_config())
    world.add(new_request("other", make_prompt(8), max_tokens=10))
    broken = world.add(new_request("broken", make_prompt(8), max_tokens=10, make_text=EndlessText))
    for _ in range(4):
        world.next_plan()
        world.answer()
    assert world.scheduler.update_request("broken", Change(max_tokens=2))
    assert broken.finished.reason is EngineFinishReason.INTERNAL
    world.check()
    del world.received["broken"]
    world.drain()


def test_a_text_that_cannot_be_released_is_missing_at_an_early_end(world, new_request, caplog):
    received = world.add(new_request("broken", make_prompt(8), max_tokens=10, make_text=EndlessText))
    for _ in range(4):
        world.next_plan()
        world.answer()
    assert world.scheduler.abort("broken", EngineFinishReason.CANCELLED)
    assert received.finished.reason is EngineFinishReason.CANCELLED
    assert received.finished.usage.output_tokens
    assert not received.token_ids
    assert "broken: its tokens could not be turned into text" in caplog.text
    world.check()


@pytest.mark.parametrize("part", ["kv.pool.retain", "tenants.leave", "predictor.ended"])
def test_any_failure_at_a_requests_end_still_reaches_its_caller(world, new_request, monkeypatch, part):
    received = world.add(new_request("one", make_prompt(8), max_tokens=3, retain_s=5.0))
    world.next_plan()
    world.answer()
    owner, name = part.rsplit(".", 1)
    monkeypatch.setattr(attrgetter(owner)(world.scheduler), name, broken_text)
    with pytest.raises((ValueError, TypeError)):
        world.scheduler.abort("one", EngineFinishReason.CANCELLED)
    world.scheduler.abandon(EngineFinishReason.INTERNAL, "the scheduler failed")
    assert received.finished is not None


def test_a_limit_that_comes_with_the_last_token_changes_nothing(world_type, new_request):
    world = world_type(100, make_config())
    received = world.add(new_request("one", make_prompt(8), max_tokens=3))

    def sink(event):
        received.sink(event)
        if isinstance(event, SequenceDelta) and event.end is not None:
            world.scheduler.update_request("one", Change(max_tokens=1))

    received.request.sink = sink
    world.drain()
    assert received.finished.reason is EngineFinishReason.LENGTH


def test_a_sink_may_abort_its_request(world, new_request):
    received = world.add(new_request("one", make_prompt(5), n=2, max_tokens=3))
    take = received.sink

    def sink(event):
        take(event)
        if not isinstance(event, RequestFinished):
            world.scheduler.abort("one", EngineFinishReason.CANCELLED)

    received.request.sink = sink
    while world.alive():
        world.schedule()
        world.answer()
    world.drain()
    assert received.finished.reason is EngineFinishReason.CANCELLED
