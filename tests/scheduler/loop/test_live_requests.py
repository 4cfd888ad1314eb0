"""The list of live requests: what it says of each, in which order, and a scan that goes on while requests come and
go."""

import random

import pytest

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop import live_requests
from penstock.scheduler.loop.live_requests import LiveRequest, LiveRequestFilter, RequestStatus
from penstock.scheduler.plan import Pooling
from penstock.scheduler.request import Change, EngineFinishReason, Prompt

BLOCK_SIZE = 4
ALL = LiveRequestFilter()


def prompt(length, first=0):
    return [(first + position) % 7 for position in range(length)]


@pytest.fixture
def world(world_type):
    return world_type(64, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))


@pytest.fixture
def embed(new_request):
    def make(name, prompts):
        salt = tenant_salt("fake", "default")
        more = [Prompt(prompt, hash_blocks(prompt, BLOCK_SIZE, salt)) for prompt in prompts[1:]]
        return new_request(name, prompts[0], pooling=Pooling.MEAN, more_prompts=more, n=len(prompts), max_tokens=0)

    return make


def listed(world, wanted=ALL, after=-1, at_once=100):
    """The whole list, read in parts."""
    scan, found = world.scheduler.scan(wanted, after), []
    while not scan.is_done:
        found += scan.read(at_once)
    return found


def statuses(world):
    return {live.request.request_id: live.status.name for live in listed(world)}


def test_every_fact_of_a_request(world, new_request):
    world.now = 7.0
    request = new_request("r", prompt(9), "acme", arrival=5.0, client_request_id="mine", n=2, max_tokens=6, priority=-3)
    world.add(request)
    for _ in range(4):
        world.step()
    [live] = listed(world)
    received = world.received["r"]
    num_output_tokens = sum(map(len, received.token_ids.values()))
    assert num_output_tokens > 2
    assert live == LiveRequest(
        0, request, RequestStatus.DECODING, num_output_tokens=num_output_tokens, max_tokens=6, num_preemptions=0
    )
    world.scheduler.update_request("r", Change(max_tokens=9, priority=4))
    [live] = listed(world)
    assert (live.max_tokens, live.request.priority) == (9, 4)


def test_the_status_follows_a_request(world, new_request):
    world.add(new_request("long", prompt(30), max_tokens=8))
    assert statuses(world) == {"long": "WAITING"}
    world.step()
    assert statuses(world) == {"long": "PREFILLING"}
    world.add(new_request("later", prompt(30, first=3), max_tokens=8))
    assert statuses(world) == {"long": "PREFILLING", "later": "WAITING"}
    world.step()
    assert statuses(world)["long"] == "DECODING"
    world.scheduler.hold("long", True)
    assert statuses(world)["long"] == "HELD"
    world.scheduler.hold("long", False)
    assert statuses(world)["long"] == "DECODING"
    world.drain()
    assert statuses(world) == {}


def test_during_a_trial_only_those_on_trial_may_run(world, new_request):
    for number in range(4):
        world.add(new_request(str(number), prompt(5, number), max_tokens=9))
    world.next_plan()
    for _ in range(2):
        world.recover(blames_step=True)
        world.next_plan()
    on_trial = world.scheduler._bisector.on_trial
    assert 0 < len(on_trial) < 4
    held = {name for name, status in statuses(world).items() if status == "HELD"}
    assert held == set(world.alive()) - on_trial


def test_a_request_to_embed_has_no_output_and_never_decodes(world, embed):
    world.add(embed("vectors", [prompt(12), prompt(12, 1), prompt(12, 2)]))
    seen = []
    while world.alive():
        [live] = listed(world)
        seen.append(live.status)
        assert (live.num_output_tokens, live.max_tokens) == (0, 0)
        assert (live.request.n, live.request.num_prompt_tokens) == (3, 36)
        world.schedule()
        seen.append(listed(world)[0].status)
        world.answer()
    assert set(seen) == {RequestStatus.WAITING, RequestStatus.PREFILLING}


def test_a_preempted_request_waits_and_counts_it(world_type, new_request):
    world = world_type(10, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64))
    for number in range(2):
        world.add(new_request(str(number), prompt(12, number), max_tokens=14))
    while not any(live.num_preemptions for live in listed(world)):
        world.step()
    [preempted] = [live for live in listed(world) if live.num_preemptions]
    assert preempted.status is RequestStatus.WAITING
    assert preempted.num_output_tokens > 0


def test_the_order_is_that_of_arrival_whatever_the_policy_and_updates(world, new_request):
    for number in range(8):
        world.add(new_request(str(number), prompt(5, number), priority=-number))
    world.scheduler.update_request("0", Change(priority=-100))
    world.scheduler.abort("3", EngineFinishReason.CANCELLED)
    world.step()
    assert [live.request.request_id for live in listed(world)] == list("0124567")
    assert [live.request.request_id for live in listed(world, after=4)] == list("567")
    assert listed(world, after=7) == []


def test_a_filter_selects_by_tenant_age_and_status(world, new_request):
    for number in range(8):
        tenant = "a" if number % 2 else "b"
        world.add(new_request(str(number), prompt(5, number), tenant, arrival=float(number), max_tokens=9))
    world.step()

    def names(**wanted):
        return "".join(live.request.request_id for live in listed(world, LiveRequestFilter(**wanted)))

    running = {live.request.request_id for live in listed(world) if live.status is not RequestStatus.WAITING}
    assert 0 < len(running) < 8
    waiting = "".join(name for name in "01234567" if name not in running)
    assert names(tenant="a") == "1357"
    assert names(tenant="nobody") == ""
    assert names(arrived_by=2.0) == "012"
    assert names(tenant="b", arrived_by=5.0) == "024"
    assert names(statuses=frozenset({RequestStatus.WAITING})) == waiting
    assert names(statuses=frozenset(RequestStatus)) == "01234567"


@pytest.mark.parametrize("seed", range(5))
def test_a_scan_reads_those_that_live_throughout_once(world_type, new_request, seed):
    rng = random.Random(seed)
    world = world_type(64, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16))
    for number in range(60):
        world.add(new_request(str(number), prompt(rng.randint(1, 20), number), max_tokens=rng.randint(1, 14)))
    before = world.alive()
    scan, found = world.scheduler.scan(ALL, -1), []
    while not scan.is_done:
        new = scan.read(rng.randint(1, 5))
        assert {live.request.request_id for live in new} <= set(world.alive())
        found += [live.request.request_id for live in new]
        world.step()
        world.cancel(rng.randrange(1000))
        world.add_random(rng.randrange(1000))
    assert len(found) == len(set(found)) < len(before)
    assert set(before) & set(world.alive()) <= set(found) <= set(before)
    assert found == sorted(found, key=int)


def test_an_id_that_is_used_again_is_another_request(world, new_request):
    for name in "ab":
        world.add(new_request(name, prompt(5)))
    scan = world.scheduler.scan(ALL, -1)
    world.scheduler.abort("a", EngineFinishReason.CANCELLED)
    world.add(new_request("a", prompt(6)))
    assert [(live.request.request_id, live.request.num_prompt_tokens) for live in scan.read(9)] == [("b", 5)]
    assert [live.request.request_id for live in listed(world)] == ["b", "a"]


def test_one_read_examines_few_requests(world_type, new_request, embed, monkeypatch):
    """So that the event loop goes on, even if none of a hundred thousand matches."""
    monkeypatch.setattr(live_requests, "MAX_EXAMINED", 8)
    world = world_type(64, SchedulerConfig(max_num_seqs=4))
    for number in range(20):
        world.add(new_request(str(number), prompt(5), "a"))
    world.add(embed("vectors", [prompt(4, first) for first in range(30)]))
    world.add(new_request("last", prompt(5), "a"))
    scan = world.scheduler.scan(LiveRequestFilter(tenant="nobody"), -1)
    reads = 0
    while not scan.is_done:
        assert scan.read(100) == []
        reads += 1
    assert reads == 3
    scan = world.scheduler.scan(ALL, -1)
    assert [len(scan.read(100)) for _ in range(5)] == [4] * 5
    assert [len(scan.read(100)) for _ in range(2)] == [1, 1]
    assert scan.is_done


def test_after_a_failure_nothing_is_listed(world, new_request):
    world.add(new_request("a", prompt(5)))
    scan = world.scheduler.scan(ALL, -1)
    world.scheduler.abandon(EngineFinishReason.INTERNAL, "it failed")
    assert scan.read(9) == []
    assert scan.is_done
