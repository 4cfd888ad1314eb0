"""What a tenant may have a second and a minute: never more than that, never less, and a refusal says when."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.planning.rate_limit import Rated, TenantRateLimit, TokenBucket
from penstock.scheduler.planning.tenants import MAX_REMEMBERED, TenantAccounting
from penstock.scheduler.request import RefusalKind, Refused


class TestBucket:
    """Fills steadily."""

    def test_it_is_full_at_first_and_fills_again(self):
        bucket = TokenBucket(10, 2, now=100)
        bucket.take_tokens(10, 100)
        assert bucket.level(100) == 0
        assert bucket.level(102.5) == 5
        assert bucket.level(1000) == 10

    def test_the_reported_wait_is_the_shortest_sufficient_one(self):
        bucket = TokenBucket(10, 2, now=0)
        bucket.take_tokens(13, 0)
        assert bucket.wait_s(1, 0) == 2
        assert bucket.wait_s(1, 2) == 0
        assert bucket.wait_s(99, 2) == pytest.approx(4.5)  # until it is full

    def test_another_size_keeps_what_is_owed(self):
        bucket = TokenBucket(10, 2, now=0)
        bucket.take_tokens(15, 0)
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
        rate_limit, now, taken = TenantRateLimit(TenantLimits(requests_per_second=rate), 0.0), 0.0, []
        for gap in gaps:
            now += gap
            if not rate_limit.wait_s(Rated.REQUEST, 1, now):
                rate_limit.take(Rated.REQUEST, 1, now)
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
        world.scheduler.add_request(request)
    return refused.value


@pytest.mark.parametrize("kind", [Rated.REQUEST, Rated.TOKENIZER_CALL])
def test_requests_come_no_faster_than_they_may(world, kind):
    world = world(a=TenantLimits(requests_per_second=2))
    scheduler = world.scheduler
    for _ in range(2):
        scheduler.charge("a", kind)
    with pytest.raises(Refused) as refused:
        scheduler.charge("a", kind)
    assert refused.value.kind is RefusalKind.TENANT_RATE
    assert refused.value.retry_after_ms is not None
    assert 450 <= refused.value.retry_after_ms <= 500
    assert "try again in 0.5 s" in refused.value.message
    scheduler.charge("b", kind)
    world.now += refused.value.retry_after_ms / 1000
    scheduler.charge("a", kind)
    with pytest.raises(Refused):
        scheduler.charge("a", kind)


def test_requests_and_calls_of_the_tokenizer_are_counted_apart(world):
    world = world(a=TenantLimits(requests_per_second=1))
    world.scheduler.charge("a", Rated.REQUEST)
    world.scheduler.charge("a", Rated.TOKENIZER_CALL)
    with pytest.raises(Refused, match="rate of tokenizer calls"):
        world.scheduler.charge("a", Rated.TOKENIZER_CALL)


def test_tokens_that_are_used_up_stop_requests_and_no_call_of_the_tokenizer(world, new_request):
    world = world(a=TenantLimits(tokens_per_minute=20))
    assert world.add(new_request("first", [1] * 20, tenant="a", max_tokens=1)) is not None
    with pytest.raises(Refused) as refused:
        world.scheduler.charge("a", Rated.REQUEST)
    assert refused.value.kind is RefusalKind.TENANT_TOKENS
    world.scheduler.charge("a", Rated.TOKENIZER_CALL)
    world.drain()


def test_tenants_without_a_rate_are_not_remembered_for_what_they_send(world):
    world = world()
    world.scheduler.charge("somebody", Rated.REQUEST)
    assert not world.scheduler.tenants._uses


def test_tenants_with_a_rate_are_remembered_within_a_bound():
    tenants = TenantAccounting(SchedulerConfig(default_tenant=TenantLimits(requests_per_second=1)), lambda: 0.0)
    for number in range(3 * MAX_REMEMBERED):
        tenants.charge(f"{number}", Rated.REQUEST)
    assert len(tenants._uses) <= 2 * MAX_REMEMBERED


def test_prompts_and_outputs_are_taken_from_the_budget(world, new_request):
    world = world(a=TenantLimits(tokens_per_minute=60))
    received = world.add(new_request("first", [1] * 20, tenant="a", max_tokens=5))
    world.drain()
    used = received.finished.usage.prompt_tokens + received.finished.usage.output_tokens
    rate_limit = world.scheduler.tenants.rate_limit("a")
    assert rate_limit.wait_s(Rated.TOKEN, 60, world.now) == pytest.approx(used - world.now)  # a second brings one


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


def test_limits_that_change_hold_at_once(world):
    scheduler = world().scheduler
    scheduler.charge("a", Rated.REQUEST)
    scheduler.reconfigure(SchedulerConfig(tenants={"a": TenantLimits(requests_per_second=1)}))
    scheduler.charge("a", Rated.REQUEST)
    with pytest.raises(Refused):
        scheduler.charge("a", Rated.REQUEST)
    scheduler.reconfigure(SchedulerConfig())
    scheduler.charge("a", Rated.REQUEST)


def test_nobody_gets_a_new_budget_by_hiding_behind_other_tenants(new_request):
    config = SchedulerConfig(default_tenant=TenantLimits(tokens_per_minute=100))
    tenants = TenantAccounting(config, lambda: 0.0)
    spender = new_request("R", [1] * 500, tenant="spent")
    tenants.leave(tenants.enter(spender), spender)
    for number in range(3 * MAX_REMEMBERED):
        other = replace(spender, tenant=f"{number}", num_paid_tokens=500)
        tenants.leave(tenants.enter(other), other)
    assert tenants.rate_limit("spent").wait_s(Rated.TOKEN, 1, 0.0) > 0


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
