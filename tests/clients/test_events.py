"""Events that are merged tell the same as events that are not."""

import copy

from hypothesis import given, settings, strategies as st

import penstock.v1 as pb
from penstock.clients.events import (
    Accepted,
    ChoiceEnd,
    Completion,
    Delta,
    Finished,
    FinishReason,
    PromptLogprobs,
    Speculation,
    Timings,
    Usage,
    collect,
    merge,
)
from penstock.clients.output import Logprobs

NUM_CHOICES = 3


def logprobs(num_tokens):
    ids, texts = list(range(num_tokens)), [b"x"] * num_tokens
    return Logprobs([-0.5] * num_tokens, 1, ids, [-0.25] * num_tokens, [], texts, list(texts))


def delta(choice, ids, with_logprobs):
    text = "".join(map(chr, ids))
    return Delta(text, ids, choice, logprobs(len(ids)) if with_logprobs else None)


DELTAS = st.builds(
    delta,
    st.integers(0, NUM_CHOICES - 1),
    st.lists(st.integers(97, 122), min_size=1, max_size=3),
    st.booleans(),
)
PROMPTS = st.lists(st.integers(1, 4).map(lambda n: PromptLogprobs(1, logprobs(n))), max_size=4)


def test_what_became_of_drafts():
    drafts = pb.Speculation(drafted_tokens=8, accepted_tokens=3, steps=2, drafted_at=[2, 2, 2, 2], accepted_at=[2, 1])
    finished = Finished.from_proto(pb.Finished(speculation=drafts))
    assert finished.speculation == Speculation(8, 3, 2, [2, 2, 2, 2], [2, 1])
    told = Completion([], finished).speculation
    assert told is not None
    assert told.mean_length == 2.5
    assert Finished.from_proto(pb.Finished()).speculation is None


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.lists(DELTAS, max_size=30), st.lists(st.integers(0, 40), max_size=5))
def test_merging_loses_nothing(prompts, deltas, cuts):
    ends = [Delta("", [], choice, end=ChoiceEnd(FinishReason.STOP)) for choice in range(NUM_CHOICES)]
    finished = Finished(FinishReason.STOP, Usage(), Timings())
    events = [Accepted("R", 1, 0, 0), *prompts, *deltas, *ends, finished]
    whole = collect(copy.deepcopy(events), NUM_CHOICES)
    waiting = []
    for event in copy.deepcopy(events):
        waiting.append(event)
        if len(waiting) in cuts:
            waiting = merge(waiting)
    waiting = merge(waiting)
    assert len(waiting) <= NUM_CHOICES + 3
    assert isinstance(waiting[0], Accepted)
    assert isinstance(waiting[-1], Finished)
    assert collect(waiting, NUM_CHOICES) == whole
    assert sum(len(choice.token_ids) for choice in whole.choices) == sum(len(each.token_ids) for each in deltas)
