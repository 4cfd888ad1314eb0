"""Idempotency keys, and which tenants' keys are forgotten first."""

import random
from collections import Counter

import pytest
from waiting import ManualClock

from penstock.service.errors import ServiceError
from penstock.service.requests.live.idempotency import KEPT_S, MAX_FORGOTTEN, IdempotencyKeys


@pytest.fixture
def clock():
    return ManualClock()


def use(keys, tenant, key):
    """Runs a request that succeeds; returns False if the key was used before."""
    try:
        keys.begin(tenant, key, "request")
    except ServiceError:
        return False
    keys.end(tenant, key, "request", succeeded=True)
    return True


def known(keys, tenant, candidates):
    """Returns the keys that are refused. The others are used and stay live, so that nothing else is forgotten."""
    refused = []
    for key in candidates:
        try:
            keys.begin(tenant, key, "probe")
        except ServiceError:
            refused.append(key)
    return refused


def test_a_busy_tenant_loses_its_own_keys(clock):
    keys = IdempotencyKeys(clock, max_keys=10)
    quiet = [str(number) for number in range(4)]
    assert all(use(keys, "quiet", key) for key in quiet)
    assert all(use(keys, "busy", str(number)) for number in range(100))
    assert known(keys, "quiet", quiet) == quiet
    assert known(keys, "busy", map(str, range(100))) == [str(number) for number in range(94, 100)]


def test_keys_expire_by_age_whoever_has_them(clock):
    keys = IdempotencyKeys(clock, max_keys=10)
    for tenant in "ab":
        use(keys, tenant, "early")
    clock.now += KEPT_S / 2
    use(keys, "a", "late")
    clock.now += KEPT_S / 2 + 1
    assert known(keys, "a", ["early", "late"]) == ["late"]
    assert known(keys, "b", ["early"]) == []


def test_old_keys_are_forgotten_a_few_at_a_time(clock):
    keys = IdempotencyKeys(clock)
    for number in range(3 * MAX_FORGOTTEN):
        use(keys, "a", str(number))
    clock.now += KEPT_S + 1
    assert use(keys, "a", str(3 * MAX_FORGOTTEN - 1)), "it is too old, even if it is not forgotten yet"
    assert len(keys._ended) == 2 * MAX_FORGOTTEN
    assert use(keys, "b", "x")
    assert use(keys, "b", "y")
    assert set(keys._ended) == {("a", str(3 * MAX_FORGOTTEN - 1)), ("b", "x"), ("b", "y")}


def test_a_key_of_a_failed_request_may_be_used_again(clock):
    keys = IdempotencyKeys(clock)
    keys.begin("a", "key", "first")
    keys.end("a", "key", "first", succeeded=False)
    assert use(keys, "a", "key")
    assert not use(keys, "a", "key")


def test_the_largest_tenant_loses_its_oldest_key_whatever_happens(clock):
    rng = random.Random(3)
    keys = IdempotencyKeys(clock, max_keys=25)
    ended: list[tuple[float, str, str]] = []
    for number in range(2000):
        clock.now += rng.choice((0.0, 1.0, 20.0))
        ended = [each for each in ended if each[0] > clock.now - KEPT_S]
        tenant = rng.choice("aaaabbc") if number % 400 < 300 else "d"
        assert use(keys, tenant, str(number))
        ended.append((clock.now, tenant, str(number)))
        if len(ended) > 25:
            numbers = Counter(tenant for _, tenant, _ in ended)
            [lost] = {(tenant, key) for _, tenant, key in ended} - set(keys._ended)
            assert numbers[lost[0]] == max(numbers.values())
            oldest = next(key for _, tenant, key in ended if tenant == lost[0])
            assert lost[1] == oldest
            ended = [each for each in ended if each[1:] != lost]
        assert {each[1:] for each in ended} == set(keys._ended)
