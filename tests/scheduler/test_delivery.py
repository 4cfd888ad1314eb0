"""Stop conditions that meet: the end that a choice reports when its last token brings more than one."""

import pytest

from penstock.scheduler.delivery import Delivery
from penstock.scheduler.request import FinishReason, Matched, Released

EOS = 9


class StopsAtTheEnd:
    """Only when nothing more comes is it known that the last token was a stop string."""

    def __init__(self):
        self.num_held = 0

    def feed(self, token_id):
        self.num_held += 1
        return Released(0, "")

    def finish(self):
        return Released(self.num_held - 1, "a" * (self.num_held - 1), stop="a")


@pytest.mark.parametrize(("last", "num_shown"), [(1, 2), (EOS, 1)], ids=["max_tokens", "a stop token"])
def test_a_stop_string_that_is_complete_only_at_the_end_is_the_end(last, num_shown):
    delivery = Delivery(0, StopsAtTheEnd(), [EOS], min_tokens=0, max_tokens=3, num_top_logprobs=None)
    delta = delivery.take([1, 1, last], None)
    assert delta is not None
    assert delta.end == delivery.end == Matched(FinishReason.STOP, stop="a")
    assert (delta.token_ids, delta.text) == ([1] * num_shown, "a" * num_shown)


def test_a_stop_token_at_max_tokens_is_a_stop():
    class Plain(StopsAtTheEnd):
        def finish(self):
            return Released(self.num_held, "a" * self.num_held)

    delivery = Delivery(0, Plain(), [EOS], min_tokens=0, max_tokens=2, num_top_logprobs=None)
    delta = delivery.take([1, EOS, 1], None)
    assert delta is not None
    assert (delta.token_ids, delta.end) == ([1], Matched(FinishReason.STOP, stop_token_id=EOS))
    assert delivery.num_tokens == 2
