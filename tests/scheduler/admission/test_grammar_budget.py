"""What the grammars of live requests may take: large ones only, by tenant, and each compiled once."""

import pytest
from known_requests import make_config, make_prompt, make_request

from penstock.scheduler.admission import grammar_budget
from penstock.scheduler.admission.grammar_budget import SMALL_BYTES, GrammarBudget
from penstock.scheduler.request import EngineFinishReason, RefusalKind, Refused


def request_with(grammar, n=1, tenant="a"):
    return make_request("x", make_prompt(4), grammar=grammar, n=n, tenant=tenant)


def refusal(budget, request):
    with pytest.raises(Refused) as refused:
        budget.check(request)
    return refused.value


def num_entered(budget, request, most=10_000):
    """How many such requests may be alive at a time."""
    for number in range(most):
        try:
            budget.check(request)
        except Refused:
            return number
        budget.count(request, 1)
    return most


def test_small_grammars_never_count():
    budget = GrammarBudget()
    assert num_entered(budget, request_with("g" * SMALL_BYTES, n=64)) == 10_000


def test_a_grammar_is_compiled_once_for_all_rows_of_a_tenant():
    same, distinct = GrammarBudget(), GrammarBudget()
    num_same = num_entered(same, request_with("g" * 20_000))
    for number in range(10_000):
        request = request_with(f"{number:05}" * 4000)
        try:
            distinct.check(request)
        except Refused:
            break
        distinct.count(request, 1)
    assert 60 <= number <= 120
    assert num_same > 4 * number


def test_one_tenant_leaves_as_much_to_others():
    budget = GrammarBudget()
    num_own = num_entered(budget, request_with("g" * 50_000))
    num_others = num_entered(budget, request_with("g" * 50_000, tenant="b"))
    assert num_others > num_own / 3
    assert num_entered(budget, request_with("g" * 50_000, tenant="c")) > 0


def test_what_has_ended_takes_nothing():
    budget = GrammarBudget()
    request = request_with("g" * 100_000, n=20)
    num_entered_first = num_entered(budget, request)
    assert refusal(budget, request).kind is RefusalKind.QUEUE_FULL
    assert refusal(budget, request).retry_after_ms is not None
    for _ in range(num_entered_first):
        budget.count(request, -1)
    assert num_entered(budget, request) == num_entered_first
    for _ in range(num_entered_first):
        budget.count(request, -1)
    assert (budget._total, budget._tenants) == (0, {})


def test_what_never_fits_names_the_remedy():
    refused = refusal(GrammarBudget(), request_with("g" * 250_000, n=100))
    assert refused.kind is RefusalKind.TOO_LARGE
    assert refused.retry_after_ms is None
    assert "lower n" in refused.message


def test_every_end_of_a_request_gives_its_part_back(world_type, new_request, monkeypatch):
    monkeypatch.setattr(grammar_budget, "SMALL_BYTES", 0)
    monkeypatch.setattr(grammar_budget, "MAX_BYTES", 4 * 90)
    world = world_type(100, make_config())
    for number in range(2):
        world.add(new_request(str(number), make_prompt(4, first=number), grammar="g", max_tokens=4))
    world.add(new_request("large", make_prompt(4, first=9), grammar=" " * 8))
    assert world.num_refused == 1
    world.scheduler.abort("0", EngineFinishReason.CANCELLED)
    world.drain()
    assert world.scheduler._intake.grammar_budget._total == 0
