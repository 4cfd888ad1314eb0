"""What rows of different tenants share while their masks are computed, and what a step waits for."""

import json
import threading
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from penstock.models.structured_output import mask_round
from penstock.models.structured_output.compiler import read_tokenizer, to_grammar
from penstock.models.structured_output.manager import StructuredOutputManager
from penstock.models.structured_output.mask_lanes import BackgroundLane, StepLane
from penstock.models.structured_output.mask_work import RowWork

DEMO = Path(__file__).parents[3] / "models" / "demo"
VOCAB_SIZE = 4096


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(str(DEMO), (), VOCAB_SIZE, (4093, 4095))


def test_drafts_are_not_validated_beyond_a_mask_that_was_late(tokenizer):
    """Else all masks behind them are computed, which may be late again, and so on for ever."""
    grammars = StructuredOutputManager(lambda: tokenizer, VOCAB_SIZE)
    row = grammars.matcher(to_grammar("regex", "[ab]{10}"), 1)
    drafts = tokenizer.tokenize_str("ababab")
    assert row.at([5], 1) is not None
    assert row.num_valid([5], drafts) == len(drafts)
    row.keep(np.ones(VOCAB_SIZE // 32, dtype=np.uint32))
    assert row.num_valid([5], drafts) == 0
    # The next token leaves the mask behind.
    assert row.num_valid([5, drafts[0]], drafts[1:]) == len(drafts) - 1


def test_tenants_share_no_grammar(tokenizer):
    """Nor its lock, nor how slow it was."""
    grammars = StructuredOutputManager(lambda: tokenizer, VOCAB_SIZE)
    ours, same, theirs = (grammars.matcher(to_grammar("any_json", ""), 1, tenant).grammar for tenant in ("a", "a", "b"))
    assert ours is same
    ours.note_slow()
    ours.note_slow()
    assert ours.is_apart
    assert not theirs.is_apart
    with ours.lock:
        assert theirs.try_lock()


def test_work_in_the_background_holds_no_lock_while_its_tokens_are_not_known():
    """And a tenant has one thread there, so that another one's is free."""
    ran: SimpleQueue[object] = SimpleQueue()

    class Some(RowWork):
        def __init__(self, tenant, is_known=True):
            self.tenant, self.lock, self.known, self.go_on = (
                tenant,
                threading.Lock(),
                threading.Event(),
                threading.Event(),
            )
            if is_known:
                self.known.set()

        def run(self):
            ran.put(self)
            self.go_on.wait()
            return True

        def finish(self):
            assert not self.lock.locked()

    lane = BackgroundLane()
    unknown, first, second, other = Some("a", is_known=False), Some("a"), Some("a"), Some("b")
    for work in (unknown, first, second, other):
        lane.add_work(work)
    assert {ran.get(), ran.get()} == {first, other}
    assert not unknown.lock.locked()
    assert not second.lock.locked()
    first.go_on.set()
    assert ran.get() is second
    unknown.known.set()
    second.go_on.set()
    assert ran.get() is unknown
    other.go_on.set()
    unknown.go_on.set()


def test_a_step_waits_longer_only_while_its_masks_have_no_core(monkeypatch):
    """By the CPU time of the thread that computes them."""
    lane = StepLane()
    now_s, used_s = 0.0, 0.0
    monkeypatch.setattr(lane, "cpu_s", lambda: used_s)
    words = np.zeros((1, 1), dtype=np.uint32)
    round_ = mask_round.MaskRound(words, threading.Event(), Future(), lane, BackgroundLane(), lambda: None)
    monkeypatch.setattr(mask_round, "monotonic", lambda: now_s)
    assert round_._left_s(0.0, 0.0) == mask_round.STEP_BUDGET_S
    now_s = mask_round.STEP_BUDGET_S
    assert round_._left_s(0.0, 0.0) > 0.0
    used_s = mask_round.STEP_BUDGET_S
    assert round_._left_s(0.0, 0.0) == 0.0
    now_s, used_s = mask_round.LOADED_BUDGET_S, 0.0
    assert round_._left_s(0.0, 0.0) == 0.0


def test_forced_text_has_the_same_tokens_wherever_a_row_goes_on(tokenizer):
    """As after a crash: its pieces begin and end elsewhere then."""
    text = (DEMO.parents[1] / "LICENSE").read_text()[:2000]
    grammars = StructuredOutputManager(lambda: tokenizer, VOCAB_SIZE)

    def forced_after(token_ids):
        row = grammars.matcher(to_grammar("choices", json.dumps([text])), 1)
        history = [5, *token_ids]
        row.at(history, len(history))
        while row.force(tokenizer):
            pass
        return row.kept(len(history))

    expected = tokenizer.tokenize_str(text)
    for end in range(0, len(expected) - 1, 7):
        token_ids = forced_after(expected[:end])
        assert token_ids == expected[end : end + len(token_ids)]
        assert token_ids
