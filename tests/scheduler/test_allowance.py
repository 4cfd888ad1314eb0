"""What a tenant may have a second and a minute: never more than that, never less, and a refusal says when."""

import pytest
from hypothesis import given, strategies as st

from penstock.scheduler.allowance import Allowance, Bucket
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.request import RefusalKind, Refused
from penstock.scheduler.tenants import MAX_REMEMBERED, Tenants


class TestBucket:
    """Fills steadily."""

    def test_it_is_full_at_first_and_fills_again(self):
        bucket = Bucket(10, 2, now=100)
        bucket.take(10, 100)
        assert bucket.level(100) == 0
        assert bucket.level(102.5) == 5
        assert bucket.level(1000) == 10

    def test_the_time_that_it_tells_is_enough_and_no_less_is(self):
        bucket = Bucket(10, 2, now=0)
        bucket.take(13, 0)
        assert bucket.wait_s(1, 0) == 2
        assert bucket.wait_s(1, 2) == 0
        assert bucket.wait_s(99, 2) == pytest.approx(4.5)  # until it is full

    def test_another_size_keeps_what_is_owed(self):
        bucket = Bucket(10, 2, now=0)
        bucket.take(15, 0)
        bucket.resize(100, 50, 0)
        assert bucket.level(0) == -5
        assert bucket.wait_s(20, 0) == 0.5
        bucket.resize(1, 1, 60)
        assert bucket.level(60) == 1

    @given(
        rate=st.floats(0.1, 100),
        gaps=st.lists(st.floats(0, 2), min_size=1, max_size=200),
    )
    def test_no_stretch_of_time_has_more_than_it_may(self, rate, gaps):
        allowance, now, taken = Allowance(TenantLimits(requests_per_second=rate), 0.0), 0.0, []
        for gap in gaps:
            now += gap
            if not allowance.request_wait_s(now):
                allowance.take_request(1, now)
                taken.append(now)
        for first in range(0, len(taken), 7):
            for last in range(first, len(taken)):
                assert last - first + 1 <= max(1.0, rate) + rate * (taken[last] - taken[first]) + 1e-6


@pytest.fixture
def world(world_type):
    """A scheduler with limits for tenants, whose clock a test may put forward."""
    return lambda **tenants: world_type(100, SchedulerConfig(tenants=tenants))


def refusal(world, request):
    with pytest.raises(Refused) as refused:
        world.scheduler.add(request)
    return refused.value


def test_requests_come_no_faster_than_they_may(world, new_request):
    world = world(a=TenantLimits(requests_per_second=2))

    def request(number, tenant="a"):
        return new_request(f"{tenant}{number}", [1, 2, 3], tenant=tenant, max_tokens=1)

    for number in range(2):
        assert world.add(request(number)) is not None
    refused = refusal(world, request(2))
    assert refused.kind is RefusalKind.TENANT_RATE
    assert 450 <= refused.retry_after_ms <= 500
    assert "try again in 0.5 s" in refused.message
    assert world.add(request(3, "b")) is not None
    world.now += refused.retry_after_ms / 1000
    assert world.add(request(4)) is not None
    assert refusal(world, request(5)).kind is RefusalKind.TENANT_RATE
    world.drain()


def test_what_is_refused_for_another_reason_takes_nothing(world, new_request):
    world = world(a=TenantLimits(requests_per_second=1, max_prompt_tokens=4))
    assert refusal(world, new_request("long", [1] * 5, tenant="a")).kind is RefusalKind.TENANT_CAP
    assert world.add(new_request("short", [1], tenant="a")) is not None
    world.drain()


def test_prompts_and_outputs_are_taken_from_the_budget(world, new_request):
    world = world(a=TenantLimits(tokens_per_minute=60))
    received = world.add(new_request("first", [1] * 20, tenant="a", max_tokens=5))
    world.drain()
    used = received.finished.usage.prompt_tokens + received.finished.usage.output_tokens
    allowance = world.scheduler.tenants.allowance("a")
    assert allowance.token_wait_s(60, world.now) == pytest.approx(used - world.now)  # a second brings one


def test_a_prompt_waits_until_it_fits_and_a_longer_one_until_all_is_there(world, new_request):
    world = world(a=TenantLimits(tokens_per_minute=30))
    assert world.add(new_request("first", [1] * 20, tenant="a", max_tokens=1)) is not None
    world.drain()
    refused = refusal(world, new_request("second", [1] * 20, tenant="a"))
    assert refused.kind is RefusalKind.TENANT_TOKENS
    assert 20_000 <= refused.retry_after_ms <= 23_000  # 21 tokens are used, and 2 s bring one
    assert world.add(new_request("other", [1] * 20, tenant="b")) is not None
    long = refusal(world, new_request("long", [1] * 40, tenant="a", max_tokens=1))
    assert 40_000 <= long.retry_after_ms <= 43_000
    world.now += 60
    assert world.add(new_request("again", [1] * 40, tenant="a", max_tokens=1)) is not None
    assert refusal(world, new_request("at once", [1], tenant="a")).kind is RefusalKind.TENANT_TOKENS
    world.drain()


def test_limits_that_change_hold_at_once(world, new_request):
    world = world()

    def add(number):
        return world.scheduler.add(new_request(f"{number}", [1], tenant="a", max_tokens=1))

    add(1)
    world.scheduler.reconfigure(SchedulerConfig(tenants={"a": TenantLimits(requests_per_second=1)}))
    add(2)
    with pytest.raises(Refused):
        add(3)
    world.scheduler.reconfigure(SchedulerConfig())
    add(4)


def test_nobody_gets_a_new_budget_by_hiding_behind_other_tenants():
    config = SchedulerConfig(default_tenant=TenantLimits(tokens_per_minute=100))
    tenants = Tenants(config, lambda: 0.0)
    tenants.leave(tenants.enter("spent", 500))
    for number in range(3 * MAX_REMEMBERED):
        tenants.leave(tenants.enter(f"{number}", 0))
    assert tenants.allowance("spent").token_wait_s(1, 0.0) > 0


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"requests_per_second": 0}, "requests_per_second is 0"),
        ({"requests_per_second": float("nan")}, "requests_per_second is nan"),
        ({"tokens_per_minute": 0}, "tokens_per_minute is 0"),
    ],
)
def test_limits_are_bounded(limits, problem):
    with pytest.raises(ValueError, match=problem):
        TenantLimits(**limits)
