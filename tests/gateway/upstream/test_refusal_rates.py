"""The rate at which a tenant's requests are refused by the gateway."""

import pytest

from penstock.clients.gateway.upstream import refusal_rates
from penstock.clients.gateway.upstream.refusal_rates import RefusalRates


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def rates(now):
    return RefusalRates(lambda: now[0])


def test_without_a_rate_nothing_is_limited(rates):
    rates.set("a", None)
    for _ in range(100):
        rates.count("a")
    assert rates.wait_s("a") == rates.wait_s("unknown") == 0


def test_as_many_as_come_in_a_second_may_come_at_once(rates, now):
    rates.set("a", 4.0)
    for _ in range(4):
        assert rates.wait_s("a") == 0
        rates.count("a")
    assert rates.wait_s("a") == pytest.approx(0.25)
    now[0] += 0.25
    assert rates.wait_s("a") == 0


def test_one_may_come_however_low_the_rate_is(rates, now):
    rates.set("a", 0.1)
    assert rates.wait_s("a") == 0
    rates.count("a")
    assert rates.wait_s("a") == pytest.approx(10)
    now[0] += 1000
    rates.count("a")
    assert rates.wait_s("a") == pytest.approx(10)  # nothing is saved up


def test_a_rate_that_stays_keeps_what_was_used_and_tenants_are_apart(rates):
    for tenant in ("a", "b"):
        rates.set(tenant, 1.0)
    rates.count("a")
    rates.set("a", 1.0)
    assert rates.wait_s("a") > 0
    assert rates.wait_s("b") == 0
    rates.set("a", None)
    assert rates.wait_s("a") == 0


def test_the_number_of_remembered_tenants_is_limited(rates, monkeypatch):
    monkeypatch.setattr(refusal_rates, "MAX_TENANTS", 2)
    for tenant in "abc":
        rates.set(tenant, 1.0)
        rates.count(tenant)
    assert [rates.wait_s(tenant) > 0 for tenant in "abc"] == [False, True, True]
