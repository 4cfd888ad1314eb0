"""Rows whose masks are late or take too long: they sit out, their outputs are the same, and no other row waits."""

import random
import threading
import time

import pytest
from grammar_world import DEMO, EOS, KINDS, LONG, MAX_TOKENS, VOCAB_SIZE, Guesses, World, add_all, block_masks, check

from penstock.models.backends.base import load_backend
from penstock.models.batch import grammar_matcher as matcher
from penstock.models.batch.grammar_matcher import MESSAGES, GrammarMatcher
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.structured_output import mask_round, mask_work
from penstock.models.structured_output.compiler import read_tokenizer
from penstock.models.structured_output.manager import StructuredOutputManager
from penstock.models.structured_output.mask_work import MaskTools, RowWork
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import RowFailure
from penstock.scheduler.worker_config import WorkerConfig


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(str(DEMO), (), VOCAB_SIZE, EOS)


@pytest.fixture(scope="module")
def backend():
    return load_backend(
        WorkerConfig(
            str(DEMO), backend="reference", dtype="float32", kv_cache_bytes=32 << 20, max_model_len=512,
            tokenizer=str(DEMO), tokenizer_vocab_size=VOCAB_SIZE, eos_token_ids=EOS,
        )
    )  # fmt: skip


@pytest.fixture
def make_world(backend, tokenizer):
    def make(drafter=None, **options):
        controller = drafter and SpeculationController(drafter, 8, StepCost(2048), runs_ahead=False, clock=lambda: 0.0)
        return World(
            Runner(backend, controller, StructuredOutputManager(lambda: tokenizer, VOCAB_SIZE, **options)), tokenizer
        )

    return make


@pytest.fixture(scope="module")
def oracle(backend, tokenizer):
    """What each grammar's row outputs alone, where steps wait for masks and nothing is drafted."""
    outputs = {}
    for number, (kind, grammar) in enumerate(KINDS.items()):
        world = World(
            Runner(backend, None, StructuredOutputManager(lambda: tokenizer, VOCAB_SIZE, puts_off=False)), tokenizer
        )
        world.add(0, grammar, seed=number)
        outputs[kind] = world.run()[0]
        world.drop()
    return outputs


@pytest.mark.parametrize("max_drafts", [0, 6])
@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
def test_late_rows_output_what_they_would_in_time(monkeypatch, make_world, tokenizer, oracle, chance, max_drafts):
    """Beside one another: masks are late at random, with drafts that are forced, right and wrong."""
    drawn, fill = random.Random(2), MaskTools.fill

    def fill_late(self, *args):
        if drawn.random() < chance:
            time.sleep(0.002)
        fill(self, *args)

    monkeypatch.setattr(mask_round, "STEP_BUDGET_S", 0.0005)
    monkeypatch.setattr(mask_round, "LOADED_BUDGET_S", 0.0)
    monkeypatch.setattr(matcher, "MAX_FORCED_BYTES", 12)  # less than a row has drafts for
    monkeypatch.setattr(MaskTools, "fill", fill_late)
    world = make_world(Guesses(tokenizer))
    add_all(world, max_drafts)
    world.run()
    check(world, oracle)
    world.drop()


def test_rows_of_slow_grammars_output_what_they_would_in_time(monkeypatch, make_world, tokenizer, oracle):
    """All of their masks are found out in the background."""
    monkeypatch.setattr(matcher.CompiledGrammar, "is_apart", True)
    world = make_world(Guesses(tokenizer))
    add_all(world, max_drafts=6)
    world.run()
    check(world, oracle)
    assert world.num_idle
    world.drop()


@pytest.mark.parametrize("length", [1, 7, 20, 59])
def test_rows_go_on_after_a_crash_in_the_middle_of_forced_text(monkeypatch, make_world, oracle, length):
    """Also those that are far behind, which catch up in the background."""
    monkeypatch.setattr(matcher, "MAX_BEHIND", 10)
    monkeypatch.setattr(matcher, "SLOW_CALL_S", 0.0)
    world = make_world()
    for number, (kind, grammar) in enumerate(KINDS.items()):
        output = oracle[kind][:length]
        if output[-1] not in EOS and len(output) < len(oracle[kind]):
            world.add(number, grammar, seed=number, output=output)
    for number, output in world.run().items():
        assert output == list(oracle.values())[number]
    assert not world.failures
    world.drop()


def test_no_row_waits_for_one_whose_mask_takes_long(monkeypatch, make_world, oracle):
    """It goes on when its mask is there. Meanwhile another one with a grammar, and one without, reach their ends."""
    ambiguous = list(KINDS).index("ambiguous")
    world = make_world()
    blocked, go_on = block_masks(monkeypatch, world, ambiguous)
    world.add(ambiguous, KINDS["ambiguous"], seed=ambiguous)
    world.add(2, KINDS["regex"], seed=2)
    world.add(1, "", seed=2)
    world.run(until=lambda: world.ended == {1, 2})
    assert blocked.is_set()
    assert world.outputs[ambiguous] == []
    go_on.set()
    world.run()
    assert (world.outputs[2], world.outputs[ambiguous]) == (oracle["regex"], oracle["ambiguous"])
    world.drop()


def test_only_the_row_repeatedly_over_its_budget_ends(monkeypatch, make_world, oracle):
    """With an error of its own, and what it had brought by then."""
    ambiguous = list(KINDS).index("ambiguous")
    charge = GrammarMatcher.charge
    world = make_world()

    def charge_more(self, cpu_s, num_tokens=1):
        is_slow = self is world.runner._rows[ambiguous].matcher
        return charge(self, matcher.BURST_S / 4 if is_slow else cpu_s, num_tokens)

    monkeypatch.setattr(GrammarMatcher, "charge", charge_more)
    monkeypatch.setattr(mask_work, "TRUSTED_S", -1.0)  # together they are charged only if it takes long
    world.add(ambiguous, KINDS["ambiguous"], seed=ambiguous)
    world.add(2, KINDS["regex"], seed=2)
    world.run()
    assert world.failures == {ambiguous: (MESSAGES[RowFailure.SLOW], RowFailure.SLOW)}
    output = world.outputs[ambiguous]
    assert 3 <= len(output) < len(oracle["ambiguous"])
    assert output == oracle["ambiguous"][: len(output)]
    assert world.outputs[2] == oracle["regex"]
    world.drop()


def test_forced_text_is_tokenized_once_for_a_row(monkeypatch, make_world, tokenizer):
    """In pieces, however long it is, and as the tokenizer does; the text is known to the library after the first."""
    pieces, forced_tokens = [], GrammarMatcher._forced_tokens

    def watched(self, *args):
        token_ids = forced_tokens(self, *args)
        pieces.append(len(token_ids))
        return token_ids

    monkeypatch.setattr(GrammarMatcher, "_forced_tokens", watched)
    world = make_world()
    world.add(0, KINDS["forced"])
    output = world.run()[0]
    expected = tokenizer.tokenize_str(LONG)
    assert output == expected[:MAX_TOKENS]
    assert max(pieces) > 10
    assert sum(pieces) <= len(expected)
    assert len(pieces) <= 2 + MAX_TOKENS // min(piece for piece in pieces if piece)
    world.drop()


def test_a_failed_mask_computation_ends_only_its_row(monkeypatch, make_world, oracle):
    at = GrammarMatcher.at
    world = make_world()

    def broken(self, *args):
        if self is world.runner._rows[0].matcher:
            raise RuntimeError("a panic of the library")
        return at(self, *args)

    monkeypatch.setattr(GrammarMatcher, "at", broken)
    world.add(0, KINDS["Lark"])
    world.add(2, KINDS["regex"], seed=2)
    world.run()
    assert world.failures[0][1] is RowFailure.COSTLY
    assert world.outputs[2] == oracle["regex"]
    world.drop()


def test_whoever_waits_for_masks_finds_their_rows_free(monkeypatch, make_world, oracle):
    """When a step goes on, rows whose masks were in time are not pending, and their grammars' locks are free."""
    seen: list[tuple[bool, bool]] = []
    init = mask_round.MaskRound.__init__

    def watched(self, *args):
        init(self, *args)
        notify_all = self._changed.notify_all

        def notify():
            works = [work for work in self._works if work not in self._open and work.row.number not in self.late]
            seen.extend((work.matcher.is_pending, work.lock.locked()) for work in works)
            notify_all()

        self._changed.notify_all = notify

    monkeypatch.setattr(mask_round.MaskRound, "__init__", watched)
    world = make_world()
    for number, kind in enumerate(("choices", "regex", "JSON schema")):
        world.add(number, KINDS[kind], seed=list(KINDS).index(kind))
    world.run()
    assert set(seen) == {(False, False)}
    assert world.outputs[1] == oracle["regex"]
    world.drop()


@pytest.mark.parametrize("is_apart", [False, True])
def test_rows_end_when_their_masks_cannot_be_kept(monkeypatch, make_world, oracle, is_apart):
    """As for want of memory. Other rows go on, and so do the threads."""
    keep = GrammarMatcher.keep
    world = make_world()

    def broken(self, mask):
        if self is world.runner._rows[0].matcher:
            raise MemoryError
        keep(self, mask)

    monkeypatch.setattr(GrammarMatcher, "keep", broken)
    monkeypatch.setattr(matcher.CompiledGrammar, "is_apart", is_apart)
    blocked, go_on = block_masks(monkeypatch, world, 0)
    world.add(0, KINDS["JSON schema"], seed=list(KINDS).index("JSON schema"))
    world.add(2, KINDS["regex"], seed=2)
    world.run(until=lambda: blocked.is_set() and world.num_idle)
    go_on.set()
    world.run()
    assert world.failures[0][1] is RowFailure.COSTLY
    assert world.outputs[2] == oracle["regex"]
    world.drop()


def test_rows_behind_one_whose_mask_takes_long_go_on(monkeypatch, make_world, oracle):
    """They begin together, so that nothing is known of what they take. Another thread computes the masks behind."""
    world = make_world()
    blocked, go_on = block_masks(monkeypatch, world, 0)
    ambiguous = list(KINDS).index("ambiguous")
    world.add(0, KINDS["ambiguous"], seed=ambiguous, tenant="a")
    world.add(2, KINDS["regex"], seed=2, tenant="b")
    world.add(5, KINDS["Lark"], seed=5, tenant="c")
    world.run(until=lambda: world.ended == {2, 5})
    assert blocked.is_set()
    # A second one of the same tenant, of which nothing is known, is not trusted with the thread.
    assert not world.runner._grammars._lane.takes_untrusted("a")
    assert world.runner._grammars._lane.takes_untrusted("b")
    go_on.set()
    world.run()
    assert [world.outputs[number] for number in (0, 2, 5)] == [oracle[kind] for kind in ("ambiguous", "regex", "Lark")]
    world.drop()


def test_a_row_that_is_far_behind_leaves_the_grammar_to_others_meanwhile(monkeypatch, make_world, oracle):
    held, run = [], RowWork.run

    def watched(self):
        before = self.matcher.frontier
        is_done = run(self)
        held.append(self.matcher.frontier - before)
        return is_done

    monkeypatch.setattr(RowWork, "run", watched)
    monkeypatch.setattr(matcher, "MAX_BEHIND", 3)
    monkeypatch.setattr(mask_work, "CONSUMED_TOGETHER", 4)
    world = make_world()
    world.add(0, KINDS["forced"], seed=list(KINDS).index("forced"), output=oracle["forced"][:30])
    world.run()
    assert world.outputs[0] == oracle["forced"]
    assert held[:7] == [4] * 7
    world.drop()


def test_no_step_waits_for_the_tokenizer(backend, tokenizer):
    """A prompt's last token is computed even while no grammar can be compiled, where it is a block's last."""
    go_on = threading.Event()

    def read():
        go_on.wait()
        return tokenizer

    world = World(Runner(backend, None, StructuredOutputManager(read, VOCAB_SIZE)), tokenizer)
    world.prompt = (world.prompt * 16)[:16]
    world.add(0, KINDS["regex"], seed=2)
    world.step()
    assert world.outputs[0] == []
    go_on.set()
    assert len(world.run()[0]) > 10
    world.drop()


def test_ranks_that_share_a_model_draft_no_forced_text(monkeypatch, make_world):
    """Each of them finds out by its own clock that a row ends, and their batches must have the same size."""
    sizes = []
    for is_slow in (True, False):
        world = make_world(puts_off=False)
        sizes_of_rank: list[dict[int, int]] = []
        compute = world.runner._compute

        def watched(plan, drafted, began, idle, compute=compute, sizes=sizes_of_rank):
            sizes.append({number: len(drafts) for number, drafts in drafted.drafts.items()})
            return compute(plan, drafted, began, idle)

        monkeypatch.setattr(world.runner, "_compute", watched)
        world.add(0, KINDS["forced"], seed=1, max_drafts=6)
        world.step()
        if is_slow:
            world.runner._rows[0].matcher.fail(len(world.prompt) + 1, RowFailure.SLOW)
        world.step()
        sizes.append(sizes_of_rank)
        assert bool(world.failures) == is_slow
        world.drop()
    assert sizes[0] == sizes[1]
