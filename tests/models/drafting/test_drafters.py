"""Drafters that need no model: they propose what a plain search of the texts finds, within their bounds."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from penstock.models.batch.rows import UNKNOWN, RowTable
from penstock.models.errors import ModelError
from penstock.models.speculative.drafter import Wanted
from penstock.models.speculative.ngram import NgramDrafter
from penstock.models.speculative.row_indexes import PORTION
from penstock.models.speculative.suffix import SuffixDrafter
from penstock.models.speculative.token_index import MAX_OCCURRENCES, Cursor, TokenIndex
from penstock.models.worker.speculation import check_speculation, make_controller
from penstock.scheduler.plan import AddedRow, SamplingParams, StepPlan
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig, WorkerConfig

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_OCCURRENCES)
"""So short that no place of a pair is left out."""


def new_rows(*prompts, tenants=None):
    table = RowTable(num_blocks=1, block_size=1 << 20, hidden_size=8)
    tenants = tenants or [""] * len(prompts)
    added = [
        AddedRow(row, 0, prompt, 1, 0, [0], SamplingParams(), max_drafts=8, tenant=tenant)
        for row, (prompt, tenant) in enumerate(zip(prompts, tenants, strict=True))
    ]
    table.apply(StepPlan(0, [], added, [], [], []))
    return [table[row] for row in range(len(prompts))]


def found(history, text, most):
    """The longest end of the history in the text, up to ``most``, of at least 2 tokens, and all that follows it."""
    for length in range(min(most, len(history)), 1, -1):
        tail = history[-length:]
        followers = [text[at + length :] for at in range(len(text) - length) if text[at : at + length] == tail]
        if followers:
            return length, followers
    return 0, []


def propose(drafter, row, max_drafts):
    [proposal] = drafter.propose([Wanted(row, max_drafts)])
    assert len(proposal.token_ids) == len(proposal.confidences) <= max_drafts
    assert all(0.0 <= confidence <= 1.0 for confidence in proposal.confidences)
    return proposal.token_ids


# --------------------------------------------------------------------------------------------------------------- n-gram


@given(tokens, st.lists(st.integers(1, 5)), st.integers(2, 3), st.integers(0, 3), st.integers(1, 8))
def test_ngram_proposes_what_followed_the_longest_match(text, growth, shortest, more, max_drafts):
    config = SpeculationConfig(DraftMethod.NGRAM, 8, prompt_lookup_min=shortest, prompt_lookup_max=shortest + more)
    drafter, [row] = NgramDrafter(config), new_rows(text[:1])
    for number in [0, *growth, len(text)]:
        for token in text[len(row.history) :][:number]:
            row.append(token)
        length, followers = found(row.history, row.history, shortest + more)
        drafts = propose(drafter, row, max_drafts)
        if length < shortest:
            assert drafts == []
        else:
            assert drafts in [(follower * 8)[:max_drafts] for follower in followers]  # it goes on repeating itself


def test_ngram_prefers_the_newest_but_goes_on_where_it_was():
    drafter = NgramDrafter(SpeculationConfig(DraftMethod.NGRAM, 8, prompt_lookup_max=2))
    [row] = new_rows([1, 2, 3, 4, 5, 1, 2, 6, 7, 3, 4, 8, 1, 2])
    assert propose(drafter, row, 2) == [6, 7]
    row.append(3)
    row.append(4)
    assert propose(drafter, row, 1) == [8]
    row.append(8)
    row.append(1)
    row.append(2)
    assert propose(drafter, row, 3) == [3, 4, 8]
    # The match before was followed by 1, 2, ... and goes on, though 1, 2 came since.
    [row] = new_rows([5, 1, 2, 9, *[1, 2, 6] * MAX_OCCURRENCES, 5, 1])
    assert propose(drafter, row, 1) == [2]
    row.append(2)
    assert propose(drafter, row, 1) == [9]


def test_a_long_prompt_is_indexed_in_portions_and_forgotten():
    prompt = [*range(4 * PORTION), 10, 11]
    drafter, [row] = NgramDrafter(SpeculationConfig(DraftMethod.NGRAM, 8)), new_rows([*prompt])
    assert propose(drafter, row, 3) == [12, 13, 14]
    row.history[-2:] = [3 * PORTION, 3 * PORTION + 1]
    assert [bool(propose(drafter, row, 3)) for _ in range(3)] == [False, False, True]
    # A second one has its turn when the first is done.
    [other] = new_rows([*prompt])
    drafter.drop_row(row)
    assert propose(drafter, other, 3) == [12, 13, 14]


def test_what_is_over_the_bound_is_not_indexed():
    drafter = SuffixDrafter(SpeculationConfig(DraftMethod.SUFFIX, 8), max_indexed=100)
    first, second = new_rows([*range(80), 5, 6], [*range(80), 50, 51])
    assert propose(drafter, first, 2) == [7, 8]
    assert propose(drafter, second, 2) == []
    drafter.drop_row(first)
    assert propose(drafter, second, 2) == [52, 53]


# --------------------------------------------------------------------------------------------------------------- suffix


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=MAX_OCCURRENCES // 2), min_size=1, max_size=3),
    tokens,
    st.integers(1, 4),
    st.floats(0.0, 1.0),
    st.sampled_from([0.5, 1.0, 4.0]),
)
def test_suffix_proposes_the_most_frequent_continuation(outputs, text, max_drafts, min_share, factor):
    config = SpeculationConfig(
        DraftMethod.SUFFIX,
        8,
        suffix_decoding_max_tree_depth=100,
        suffix_decoding_max_cached_requests=2,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=min_share,
    )
    drafter = SuffixDrafter(config)
    *others, row = new_rows(*outputs, text)
    for other in others:
        propose(drafter, other, 1)
        drafter.drop_row(other)
    kept = [part for output in outputs if output[1:] for part in (output[1:],)][-2:]
    # Another one's are between them, and are none of its business.
    [stranger] = new_rows([0, *text, *text], tenants=["else"])
    drafter.drop_row(stranger)
    own_length, own = found(row.history, row.history, 100)
    at_others = [found(row.history, [*output, UNKNOWN], 100) for output in kept]
    length = max([own_length, *(length for length, _ in at_others)])
    followers = [*(own if own_length == length else ())]
    for its_length, its_followers in at_others:
        followers += its_followers if its_length == length else ()
    drafts = propose(drafter, row, max_drafts)
    assert len(drafts) <= (int(factor * length) if length else 0)
    fewest = min_share * len(followers)
    for offset in range(min(max_drafts, int(factor * length))):
        counts = Counter(follower[offset] if offset < len(follower) else UNKNOWN for follower in followers)
        if offset == len(drafts):
            best = max(counts.values())
            assert best < fewest or counts[UNKNOWN] == best
            break
        assert counts[drafts[offset]] == max(counts.values()) >= fewest
        followers = [follower for follower in followers if follower[offset : offset + 1] == [drafts[offset]]]


def test_outputs_serve_drafts_only_for_their_own_tenant():
    drafter = SuffixDrafter(SpeculationConfig(DraftMethod.SUFFIX, 8))
    first, same, other = new_rows([0, 1, 2, 3, 4], [9, 1, 2], [9, 1, 2], tenants=["a", "a", "b"])
    drafter.drop_row(first)
    assert propose(drafter, same, 8) == [3, 4]
    assert propose(drafter, other, 8) == []


def test_a_token_that_is_not_known_yet_is_not_kept():
    drafter = SuffixDrafter(SpeculationConfig(DraftMethod.SUFFIX, 8))
    first, same = new_rows([0, 1, 2, 3], [9, 1, 2])
    first.expect()
    drafter.drop_row(first)
    assert propose(drafter, same, 8) == [3]


def test_matches_and_drafts_together_are_no_longer_than_the_tree_was_deep():
    config = SpeculationConfig(DraftMethod.SUFFIX, 8, suffix_decoding_max_tree_depth=6)
    # Four tokens tell which of the two comes, but only three are looked at.
    [row] = new_rows([9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 6, 7, 8, 1, 2, 3, 6, 7, 9, 1, 2, 3])
    assert propose(SuffixDrafter(config), row, 3) == [6, 7, 9]
    config = SpeculationConfig(DraftMethod.SUFFIX, 8, suffix_decoding_max_tree_depth=7)
    assert propose(SuffixDrafter(config), row, 3) == [4, 5, 8]


def test_memory_is_bounded_and_the_tenant_that_was_quiet_the_longest_loses_its_oldest():
    drafter = SuffixDrafter(SpeculationConfig(DraftMethod.SUFFIX, 8), max_indexed=60)
    asking = dict(zip("abc", new_rows([0, 1, 2], [0, 1, 2], [0, 1, 2], tenants=[*"abc"]), strict=True))
    finished = new_rows(*[[0, *range(1, 20)]] * 3, tenants=[*"abc"])
    for row in finished[:2]:
        drafter.drop_row(row)
    assert propose(drafter, asking["b"], 2) == propose(drafter, asking["a"], 2) == [3, 4]
    drafter.drop_row(finished[2])  # 3 outputs of 19 tokens and an end, and 6 tokens of the rows that asked
    assert propose(drafter, asking["b"], 2) == []
    assert propose(drafter, asking["a"], 2) == propose(drafter, asking["c"], 2) == [3, 4]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.lists(st.integers(0, 30)), st.data())
def test_an_index_finds_what_is_left_after_cuts(text, cuts, data):
    index = TokenIndex([])
    kept = []
    for cut in [*cuts, 0]:
        more = data.draw(st.integers(0, 20))
        index.tokens += text[:more]
        kept += text[:more]
        text = text[more:]
        index.extend(data.draw(st.integers(0, 30)))
        cut = min(cut, len(kept))
        index.cut(cut)
        del kept[:cut]
        assert index.tokens == kept
        for first in range(4):
            for second in range(4):
                places = [at for at in range(2, index.num_indexed) if kept[at - 2 : at] == [first, second]]
                told = [at for at in index.places(first, second) if at >= 2]
                assert told == places[::-1]
    assert len(index._newest) <= 16


def test_a_history_shorter_than_a_pair_has_no_match():
    index = TokenIndex([1])
    index.extend(1)
    assert Cursor(index).find([1], 4, enough=1).length == 0


# ------------------------------------------------------------------------------------------------------------- registry


def test_ranks_are_refused():
    speculation = SpeculationConfig(DraftMethod.NGRAM, 4)
    with pytest.raises(ModelError, match=r"--speculative-config: .*--tensor-parallel-size"):
        check_speculation(WorkerConfig("model", speculation=speculation, tensor_parallel_size=2))


def test_without_a_config_nothing_is_drafted(simulation):
    device = simulation(lambda n: 1.0, lambda row, at: True).device
    check_speculation(WorkerConfig("model"))
    assert make_controller(WorkerConfig("model", uses_predictions=False), device) is None
    assert make_controller(WorkerConfig("model", tensor_parallel_size=2), device) is None
