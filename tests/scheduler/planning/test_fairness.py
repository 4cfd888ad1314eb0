"""Tenants: under ``fair`` they take turns by weight, and none saves up turns; each is kept within its caps."""

from dataclasses import replace

import pytest
from known_requests import make_config, make_prompt

from penstock.scheduler.config import TenantLimits
from penstock.scheduler.planning import tenants
from penstock.scheduler.planning.context import PlanningContext
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import RefusalKind, Refused


def order_of(world, length):
    order: list[str] = []
    while len(order) < length:
        order += world.step()
    return order


def add_some(world, new_request, tenant, count, **fields):
    for number in range(count):
        name = f"{tenant}{len(world.received)}"
        world.add(new_request(name, make_prompt(8, first=number), tenant=tenant, **{"max_tokens": 6} | fields))


def test_tenants_take_turns(world_type, new_request):
    world = world_type(100, make_config(policy=Policy.FAIR, max_num_seqs=1))
    for number in range(4):
        world.add(new_request(f"a{number}", make_prompt(8, first=number), tenant="a", max_tokens=3))
    for number in range(2):
        world.add(new_request(f"b{number}", make_prompt(8, first=number), tenant="b", max_tokens=3))
    order: list[str] = []
    while world.alive():
        order += world.step()
    assert order[:4] in (["a0", "b0", "a1", "b1"], ["a0", "b0", "b1", "a1"])
    assert order[4:] == ["a2", "a3"]


def test_turns_go_by_weight(world_type, new_request):
    weights = {"a": TenantLimits(weight=3.0)}
    world = world_type(100, make_config(policy=Policy.FAIR, max_num_seqs=1, max_queued_requests=100, tenants=weights))
    for number in range(12):
        for tenant in "ab":
            world.add(new_request(f"{tenant}{number}", make_prompt(8, first=number), tenant=tenant, max_tokens=4))
    order: list[str] = []
    while len(order) < 12:
        order += world.step()
    assert sum(name.startswith("a") for name in order) == 9
    world.drain()


def test_nothing_is_held_back_for_a_tenant_that_asks_for_nothing(world_type, new_request):
    world = world_type(100, make_config(policy=Policy.FAIR, tenants={"quiet": TenantLimits(weight=1000.0)}))
    for number in range(5):
        world.add(new_request(str(number), make_prompt(4, first=number), tenant="busy"))
    assert world.step() == ["0", "1", "2", "3", "4"]
    world.drain()


def test_a_tenant_with_more_than_its_share_gives_a_row(world_type, new_request):
    world = world_type(100, make_config(policy=Policy.FAIR, max_num_seqs=4))
    for number in range(9):
        world.add(new_request(f"a{number}", make_prompt(8, first=number), tenant="a", max_tokens=30))
    world.step()
    for number in range(3):
        world.add(new_request(f"b{number}", make_prompt(8, first=number), tenant="b", max_tokens=30))
    names = [name for _ in range(6) for name in world.step()]
    assert names == ["b0", "b1"], "it gets its half of the rows, and no more"
    world.drain()


def test_nobody_saves_up_turns(world_type, new_request, monkeypatch):
    monkeypatch.setattr(tenants, "MAX_SAVED_TOKENS", 0)
    world = world_type(100, make_config(policy=Policy.FAIR, max_num_seqs=1))
    for number in range(6):
        world.add(new_request(f"a{number}", make_prompt(20, first=number), tenant="a", max_tokens=6))
    for _ in range(20):
        world.step()
    # Had it kept its turn from the time when it asked for nothing, it would now go first three times.
    for number in range(3):
        world.add(new_request(f"b{number}", make_prompt(20, first=number), tenant="b", max_tokens=6))
    order: list[str] = []
    while len(order) < 4:
        order += world.step()
    assert sum(name.startswith("a") for name in order) >= 1
    world.drain()


def test_service_received_while_alone_does_not_count_against_a_tenant(world_type, new_request, monkeypatch):
    monkeypatch.setattr(tenants, "MAX_SAVED_TOKENS", 0)
    world = world_type(100, make_config(policy=Policy.FAIR, max_num_seqs=1))
    add_some(world, new_request, "a", 8)
    world.drain()
    add_some(world, new_request, "b", 6)
    world.step()
    add_some(world, new_request, "a", 4)
    order = order_of(world, 4)
    assert sum(name.startswith("a") for name in order) >= 2, order
    world.drain()


def test_a_stream_that_never_ends_saves_up_no_turns(world_type, new_request, monkeypatch):
    monkeypatch.setattr(tenants, "MAX_SAVED_TOKENS", 0)
    world = world_type(100, make_config(policy=Policy.FAIR, max_num_seqs=2))
    world.add(new_request("b", make_prompt(2), tenant="b", max_tokens=40))
    world.step()
    add_some(world, new_request, "a", 6, max_tokens=4)
    for _ in range(12):
        world.step()
    add_some(world, new_request, "b", 5, max_tokens=4)
    order = order_of(world, 4)
    assert sum(name.startswith("a") for name in order) >= 2, order
    world.drain()


def test_a_tenant_that_asks_for_little_goes_first(world_type, new_request):
    """It may save up as much as a few requests need, though others wait as long."""
    world = world_type(100, make_config(policy=Policy.FAIR, max_num_seqs=1))
    add_some(world, new_request, "a", 10)
    for _ in range(12):
        world.step()
    add_some(world, new_request, "b", 2)
    order = order_of(world, 2)
    assert all(name.startswith("b") for name in order), order
    world.drain()


def test_turns_begin_when_the_policy_does(world_type, new_request):
    world = world_type(100, make_config(policy=Policy.FCFS, max_num_seqs=1))
    add_some(world, new_request, "a", 10)
    add_some(world, new_request, "b", 6)
    for _ in range(20):
        world.step()
    world.config = replace(world.config, policy=Policy.FAIR)
    world.scheduler.reconfigure(world.config)
    order = order_of(world, 4)
    assert sum(name.startswith("a") for name in order) >= 2, order
    world.drain()


def test_a_tenants_caps(world_type, new_request):
    caps = TenantLimits(max_prompt_tokens=8, max_tokens=5, max_live_requests=2)
    world = world_type(100, make_config(tenants={"a": caps}))

    def refusal(**fields):
        with pytest.raises(Refused) as refused:
            world.scheduler.add_request(new_request("refused", **{"prompt": make_prompt(8), "tenant": "a"} | fields))
        return refused.value.kind

    assert refusal(prompt=make_prompt(9)) is RefusalKind.TENANT_CAP
    assert refusal(max_tokens=6) is RefusalKind.TENANT_CAP
    lowered = world.add(new_request("lowered", make_prompt(8), tenant="a", max_tokens=30, max_tokens_is_default=True))
    lowered.limits[0] = 5
    world.add(new_request("second", make_prompt(8), tenant="a", max_tokens=5))
    assert refusal(max_tokens=5) is RefusalKind.TENANT_BUSY
    world.add(new_request("other", make_prompt(9), tenant="b", max_tokens=30))
    world.drain()
    assert world.add(new_request("again", make_prompt(8), tenant="a", max_tokens=5)) is not None
    world.drain()


def test_a_tenant_that_fills_the_queue_leaves_others_their_share(world_type, new_request):
    world = world_type(100, make_config(policy=Policy.FAIR, max_num_seqs=1, max_queued_requests=6))
    loud = [new_request(f"a{number}", make_prompt(8), tenant="a") for number in range(8)]
    assert [world.add(request) is not None for request in loud] == [True] * 6 + [False] * 2
    quiet = [new_request(f"b{number}", make_prompt(8), tenant="b") for number in range(4)]
    assert [world.add(request) is not None for request in quiet] == [True] * 3 + [False]
    assert world.add(new_request("a again", make_prompt(8), tenant="a")) is None
    world.drain()


@pytest.mark.parametrize("policy", [Policy.FAIR, Policy.PRIORITY])
def test_whoever_is_given_a_row_is_predicted_to_have_it(world_type, new_request, policy):
    world = world_type(100, make_config(policy=policy, max_num_seqs=2, max_queued_requests=100))
    add_some(world, new_request, "hog", 12, max_tokens=40, priority=1)
    while len(world.alive()) > 6:
        world.step()
    for _ in range(8):  # in the middle of an output
        world.step()
    received = world.add(new_request("small", make_prompt(8, first=3), tenant="small", max_tokens=6))
    accepted = received.accepted
    assert accepted.predicted_ttft_s is not None
    assert accepted.predicted_ttft_s < 6
    begins = 0
    while "small" not in world.step():
        begins += 1
    assert begins < 4
    world.drain()


def steps_of_another_tenant(world, new_request, held):
    """How many steps a request takes beside a tenant whose streams want all blocks; ``held``: nobody reads them."""
    for number in range(8):
        world.add(new_request(f"a{number}", make_prompt(8, first=number), tenant="a", max_tokens=100))
    for _ in range(25):
        world.step()
    for number in range(held):
        world.scheduler.hold(f"a{number}", True)
    for _ in range(10):
        world.step()
    received = world.add(new_request("b", make_prompt(8), tenant="b", max_tokens=20))
    num_steps = 0
    while "b" in world.alive():
        world.step()
        num_steps += 1
    assert received.finished.usage.output_tokens == 20
    assert not received.finished.timings.preemptions, "it has the fewest rows, so it keeps its blocks"
    world.drain()
    return num_steps


@pytest.mark.parametrize("num_blocks", [18, 25, 33, 40])
@pytest.mark.parametrize("held", [0, 4, 7])
def test_streams_of_one_tenant_do_not_keep_the_blocks_from_another(world_type, new_request, held, num_blocks):
    """Neither those that go on for long, nor those that nobody reads."""
    limits = make_config(policy=Policy.FAIR, max_num_seqs=16)
    num_steps = steps_of_another_tenant(world_type(num_blocks, limits), new_request, held)
    assert num_steps <= 2 + steps_of_another_tenant(world_type(1000, limits), new_request, held)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_few_long_rows_of_one_tenant_do_not_keep_the_blocks_from_another(world_type, new_request, num_rows):
    """Shares count blocks as well as rows. The long rows go on once the other tenant is done."""
    world = world_type(10, make_config(policy=Policy.FAIR, max_num_seqs=16))
    for number in range(num_rows):
        world.add(new_request(f"a{number}", make_prompt(24 // num_rows, first=number), tenant="a", max_tokens=16))
    for _ in range(2):
        world.step()
    received = world.add(new_request("b", make_prompt(10), tenant="b", max_tokens=5))
    while "b" in world.alive():
        world.step()
    assert "a0" in world.alive(), "it waited until the long row ended"
    assert not received.finished.timings.preemptions
    world.drain()


def test_a_row_that_has_begun_goes_on_while_another_of_its_tenant_lacks_blocks(world_type, new_request, monkeypatch):
    world = world_type(12, make_config(policy=Policy.FAIR, max_num_batched_tokens=5))
    world.add(new_request("running", make_prompt(4, first=1), tenant="a", max_tokens=20))
    world.step()
    world.add(new_request("other", make_prompt(40, first=2), tenant="b"))
    world.add(new_request("large", make_prompt(40, first=3), tenant="a"))
    world.add(new_request("small", make_prompt(16, first=4), tenant="a"))
    while "small" not in world.step():
        pass
    monkeypatch.setattr(PlanningContext, "is_above_share", lambda context, tenant: tenant.name == "a")
    begun = [sequence for sequence in world.scheduler._planner.running if sequence.live.request.request_id == "small"]
    before = begun[0].num_planned
    world.step()
    assert before < begun[0].num_planned
    world.drain()
