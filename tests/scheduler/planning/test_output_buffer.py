"""Stop conditions that meet: the end that a choice reports when its last token brings more than one."""

import pytest

from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.planning.output_buffer import OutputBuffer
from penstock.scheduler.request import EngineFinishReason, StopMatch, TextDelta

EOS = 9


class StopsAtTheEnd:
    """Only when nothing more comes is it known that the last token was a stop string."""

    def __init__(self):
        self.num_held = 0

    def feed(self, token_id):
        self.num_held += 1
        return TextDelta(0, "")

    def finish(self):
        return TextDelta(self.num_held - 1, "a" * (self.num_held - 1), stop="a")

    def restart(self):
        pass


@pytest.mark.parametrize(("last", "num_shown"), [(1, 2), (EOS, 1)], ids=["max_tokens", "a stop token"])
def test_a_stop_string_that_is_complete_only_at_the_end_is_the_end(last, num_shown):
    output = OutputBuffer(0, StopsAtTheEnd(), [EOS], min_tokens=0, max_tokens=3, num_top_logprobs=None)
    delta = output.take_tokens([1, 1, last], None)
    assert delta is not None
    assert delta.end == output.end == StopMatch(EngineFinishReason.STOP, stop="a")
    assert (delta.token_ids, delta.text) == ([1, 1, last], "a" * num_shown)
    assert output.num_in_text == num_shown


def test_a_stop_token_at_max_tokens_is_a_stop():
    class Plain(StopsAtTheEnd):
        def finish(self):
            return TextDelta(self.num_held, "a" * self.num_held)

        def restart(self):
            pass

    output = OutputBuffer(0, Plain(), [EOS], min_tokens=0, max_tokens=2, num_top_logprobs=None)
    delta = output.take_tokens([1, EOS, 1], None)
    assert delta is not None
    assert (delta.token_ids, delta.end) == ([1, EOS], StopMatch(EngineFinishReason.STOP, stop_token_id=EOS))
    assert (output.num_tokens, output.num_in_text) == (2, 1)


class Echo:
    """Text for each token at once, and a stop string of its own."""

    def __init__(self, stop_at=None):
        self.stop_at = stop_at

    def feed(self, token_id):
        if token_id == self.stop_at:
            return TextDelta(0, "", "stop", (4,))
        return TextDelta(1, "x" * token_id)

    def finish(self):
        return TextDelta(0, "")

    def restart(self):
        pass


def logprobs(*values):
    return TokenLogprobs(1, list(values), [7] * len(values), [-1.0] * len(values))


@pytest.mark.parametrize(
    ("stop_at", "end", "length"),
    [
        (None, StopMatch(EngineFinishReason.STOP, stop_token_id=EOS), 0),
        (EOS, StopMatch(EngineFinishReason.STOP, stop="stop"), 4),
    ],
    ids=["a stop token", "a stop string"],
)
def test_the_tokens_that_end_a_choice_come_with_its_end(stop_at, end, length):
    """As many as its usage counts, with their log-probabilities; what follows them in the same step is nobody's."""
    eos = [] if stop_at else [EOS]
    output = OutputBuffer(0, Echo(stop_at), eos, min_tokens=0, max_tokens=9, num_top_logprobs=1)
    first = output.take_tokens([2], logprobs(-0.5))
    last = output.take_tokens([3, EOS, 5], logprobs(-1.5, -2.5, -3.5))
    assert first is not None
    assert last is not None
    assert (first.token_ids, first.text_lengths) == ([2], [2])
    assert (last.token_ids, last.text, last.end) == ([3, EOS], "xxx", end)
    assert (last.logprobs, last.text_lengths) == (logprobs(-1.5, -2.5), [3, length])
    assert (output.num_tokens, output.num_in_text) == (3, 2)


@pytest.mark.parametrize(
    ("ends", "shown", "end"),
    [
        ((EOS,), [1], StopMatch(EngineFinishReason.STOP)),
        ((), [1, EOS, 5, EOS], StopMatch(EngineFinishReason.STOP, stop_token_id=EOS)),
    ],
    ids=["of a grammar", "others"],
)
def test_the_end_of_a_grammar_ends_before_min_tokens_and_is_no_token_of_the_output(ends, shown, end):
    output = OutputBuffer(0, Echo(), [EOS, 5], min_tokens=3, max_tokens=9, num_top_logprobs=1, end_token_ids=ends)
    delta = output.take_tokens([1, EOS, 5, EOS, 1], logprobs(-1.0, -2.0, -3.0, -4.0, -5.0))
    assert delta is not None
    assert (delta.token_ids, delta.logprobs, delta.end) == (
        shown,
        logprobs(*[-1.0, -2.0, -3.0, -4.0][: len(shown)]),
        end,
    )
    assert output.num_tokens == len(shown)


def test_a_grammar_that_is_complete_at_once_ends_an_output_without_tokens():
    output = OutputBuffer(0, Echo(), [EOS], min_tokens=3, max_tokens=9, num_top_logprobs=None, end_token_ids=(EOS,))
    delta = output.take_tokens([EOS], None)
    assert delta is not None
    assert (delta.token_ids, delta.text, delta.end) == ([], "", StopMatch(EngineFinishReason.STOP))
    assert output.num_tokens == 0
