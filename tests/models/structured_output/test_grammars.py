"""Rows whose output must match a grammar: masks, drafts, rollback, and what becomes of a row that cannot go on."""

import json
import re
import threading
from pathlib import Path

import pytest
import tokenizers
from llguidance import LLTokenizer
from tokenizers import decoders, models, pre_tokenizers

from penstock.models.backends.base import load_backend
from penstock.models.batch.grammar_matcher import MESSAGES
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.drafter import Drafter, Proposal
from penstock.models.structured_output import manager
from penstock.models.structured_output.compiler import (
    GrammarError,
    compile_grammar,
    discreet,
    read_tokenizer,
    to_grammar,
)
from penstock.models.structured_output.manager import StructuredOutputManager, grammars_of
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, RowFailure, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerConfig

DEMO = Path(__file__).parents[3] / "models" / "demo"
EOS = (4093, 4095)
VOCAB_SIZE = 4096
SEEDED = SamplingParams(temperature=1.0, seed=5, stop_token_ids=EOS)
JSON = to_grammar(
    "json_schema",
    '{"type": "object", "properties": {"fruit": {"enum": ["apple", "pear"]}, "number": {"type": "integer",'
    ' "minimum": 0, "maximum": 999}}, "required": ["fruit", "number"], "additionalProperties": false,'
    ' "x-guidance": {"whitespace_flexible": false}}',
)
JSON_TEXT = re.compile(r'\{"fruit":"(apple|pear)","number":\d{1,3}\}')


@pytest.fixture(scope="module")
def tokenizer():
    return read_tokenizer(str(DEMO), (), VOCAB_SIZE, EOS)


@pytest.fixture(scope="module")
def config():
    return WorkerConfig(
        str(DEMO),
        backend="reference",
        kv_cache_bytes=8 << 20,
        max_model_len=512,
        tokenizer=str(DEMO),
        tokenizer_vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS,
    )


@pytest.fixture(scope="module")
def backend(config):
    return load_backend(config)


@pytest.fixture
def make_runner(config, backend):
    def make(drafter=None, grammars=None):
        return Runner(backend, drafter and free(drafter), grammars or grammars_of(config))

    return make


class Row:
    """Computes one row, a plan after another."""

    def __init__(self, runner, prompt, sampling, grammar, number=0, max_drafts=0, output=()):
        self.runner, self.number, self.max_drafts = runner, number, max_drafts
        self.history = [*prompt, *output]
        self.num_prompt = len(prompt)
        self.failure = ""
        self.num_drafted = self.num_steps = 0
        blocks = list(range(number * 16, number * 16 + 16))
        self.added = [
            AddedRow(number, 0, self.history.copy(), len(prompt), 0, blocks, sampling, None, max_drafts, grammar)
        ]
        self.chunks = [Chunk(number, 0, len(self.history))]

    def step(self):
        """Until the row has a token: its mask may be late on a machine that is busy."""
        num_tokens = len(self.history)
        while len(self.history) == num_tokens and not self.failure:
            added, chunks, self.added, self.chunks = self.added, self.chunks, [], []
            decodes = [] if chunks else [Decode(self.number, 1 + self.max_drafts)]
            plan = StepPlan(0, [], added, [], chunks, decodes, max_drafts=0 if chunks else self.max_drafts)
            [result] = self.runner.run(plan).rows
            self.history += result.token_ids
            self.failure = result.failure
        self.num_drafted += result.num_drafted
        self.num_steps += 1

    def run(self, max_tokens=120):
        while not self.failure and len(self.history) < self.num_prompt + max_tokens:
            self.step()
            for index, token_id in enumerate(self.output):
                if token_id in EOS:
                    del self.history[self.num_prompt + index + 1 :]
                    return self
        return self

    @property
    def output(self):
        return self.history[self.num_prompt :]

    def drop(self):
        self.runner.run(StepPlan(0, [self.number], [], [], [], []))
        return self


def free(drafter):
    """Drafting that takes no time, by a clock that stands still."""
    return SpeculationController(drafter, 8, StepCost(2048), runs_ahead=False, clock=lambda: 0.0)


class Repeats(Drafter):
    """A drafter that always proposes the same."""

    def __init__(self, *token_ids):
        self.token_ids = list(token_ids)

    def propose(self, wanted):
        return [Proposal(self.token_ids, [0.9] * len(self.token_ids)) for _ in wanted]

    def drop_row(self, row):
        pass


def prompt_of(tokenizer, text="The fruit:"):
    return tokenizer.tokenize_str(text)


def test_an_output_matches_and_ends_with_the_grammar(make_runner, tokenizer):
    row = Row(make_runner(), prompt_of(tokenizer), SEEDED, JSON).run()
    assert row.output[-1] in EOS
    assert JSON_TEXT.fullmatch(tokenizer.decode_str(row.output[:-1]))


def test_forced_tokens_are_drafted_and_change_nothing(make_runner, tokenizer):
    plain = Row(make_runner(), prompt_of(tokenizer), SEEDED, JSON).run()
    fast = Row(make_runner(), prompt_of(tokenizer), SEEDED, JSON, max_drafts=8).run()
    assert fast.output == plain.output
    assert fast.num_drafted > 0
    assert fast.num_steps < plain.num_steps


def test_a_drafter_that_is_wrong_changes_nothing(make_runner, tokenizer):
    """Its drafts match the grammar at some positions, and nowhere what is chosen."""
    grammar = to_grammar("regex", "[ab]{20}c")
    plain = Row(make_runner(), prompt_of(tokenizer), SEEDED, grammar).run()
    drafts = tokenizer.tokenize_str("b") * 3 + tokenizer.tokenize_str("c") * 3
    drafted = Row(make_runner(Repeats(*drafts)), prompt_of(tokenizer), SEEDED, grammar, max_drafts=6).run()
    assert drafted.output == plain.output
    assert 0 < drafted.num_drafted <= 3 * drafted.num_steps  # c may not come before the end


def test_a_row_goes_on_after_a_preemption_or_a_crash(make_runner, tokenizer):
    """Its output so far comes with it; the matcher is made anew."""
    runner = make_runner()
    whole = Row(runner, prompt_of(tokenizer), SEEDED, JSON).run().drop()
    for length in range(1, len(whole.output), 4):
        again = Row(runner, prompt_of(tokenizer), SEEDED, JSON, output=whole.output[:length]).run().drop()
        assert again.output == whole.output


def test_copies_of_a_grammar_go_their_own_ways(make_runner, tokenizer):
    runner = make_runner()
    alone = [
        Row(runner, prompt_of(tokenizer), SamplingParams(seed=seed, stop_token_ids=EOS), JSON).run().drop()
        for seed in (1, 2, 3)
    ]
    together = [
        Row(runner, prompt_of(tokenizer), SamplingParams(seed=seed, stop_token_ids=EOS), JSON, number)
        for number, seed in enumerate((1, 2, 3))
    ]
    while any(row.output[-1:] == [] or row.output[-1] not in EOS for row in together):
        for row in together:
            if not row.output or row.output[-1] not in EOS:
                row.step()
    assert [row.output for row in together] == [row.output for row in alone]
    assert len({tuple(row.output) for row in together}) > 1


def test_a_row_that_cannot_continue_fails_without_affecting_others(config, make_runner, tokenizer):
    """Its matcher is in error; the other's output is what it is alone."""
    runner = make_runner()
    alone = Row(make_runner(), prompt_of(tokenizer), SEEDED, JSON).run()
    other = Row(runner, prompt_of(tokenizer), SEEDED, JSON, number=1)
    other.step()
    broken = Row(runner, prompt_of(tokenizer), SEEDED, to_grammar("regex", "a+"))
    broken.step()
    row = runner._rows[0]
    row.matcher.library.consume_token(EOS[0] - 1)
    broken.step()
    assert broken.failure == MESSAGES[RowFailure.COSTLY]
    assert len(broken.output) == 1
    assert other.run().output == alone.output


def test_a_grammar_that_does_not_compile_ends_its_row(make_runner, tokenizer):
    row = Row(make_runner(), prompt_of(tokenizer), SEEDED, to_grammar("regex", "(?=a)b"))
    row.step()
    assert (row.failure, row.output) == (MESSAGES[RowFailure.COSTLY], [])


def test_a_grammar_is_compiled_once(config, tokenizer):
    grammars = StructuredOutputManager(lambda: tokenizer, VOCAB_SIZE)
    first, second = grammars.matcher(JSON, 1), grammars.matcher(JSON, 2)
    assert first.grammar is second.grammar
    assert first.at([5], 1) is not second.at([5, 5], 2)


def test_compiled_grammars_are_kept_up_to_a_length(config, tokenizer):
    grammars = StructuredOutputManager(lambda: tokenizer, VOCAB_SIZE)
    texts = [to_grammar("choices", json.dumps([str(number) * 200_000])) for number in range(3)]
    first, _, last = (grammars.matcher(text, 1).grammar for text in texts)
    assert grammars.matcher(texts[2], 1).grammar is last
    assert grammars.matcher(texts[0], 1).grammar is not first


def test_a_long_choice_matches_exactly_its_text(tokenizer):
    text = "".join(f'line {number}: \\ "quoted" ä\n' for number in range(200))
    matcher = compile_grammar(tokenizer, to_grammar("choices", json.dumps([text, "short"])))
    token_ids = tokenizer.tokenize_str(text)
    assert matcher.consume_tokens(token_ids)
    assert matcher.is_accepting()
    assert not matcher.deep_copy().try_consume_tokens(tokenizer.tokenize_str("x"))
    other = compile_grammar(tokenizer, to_grammar("choices", json.dumps([text])))
    assert other.try_consume_tokens(tokenizer.tokenize_str(f"{text[:1000]}!")) < len(token_ids)


@pytest.mark.parametrize("length", [1, 4])
def test_no_row_waits_for_another_ones_grammar_to_compile(monkeypatch, make_runner, tokenizer, length):
    """Its own prompt is computed meanwhile, and what it outputs is the same."""
    prompt = prompt_of(tokenizer)[:length]
    alone = Row(make_runner(), prompt, SEEDED, JSON).run()
    free = Row(make_runner(), prompt_of(tokenizer), SEEDED, "").run(8)
    go_on = threading.Event()

    def compile_slowly(*arguments):
        go_on.wait()
        return compile_grammar(*arguments)

    monkeypatch.setattr(manager, "compile_grammar", compile_slowly)
    runner = make_runner()
    beside, waiting = Row(runner, prompt_of(tokenizer), SEEDED, ""), Row(runner, prompt, SEEDED, JSON, number=1)
    beside.step()
    plan = StepPlan(0, [], waiting.added, [], waiting.chunks, [Decode(0, 1)])
    for _ in range(3):
        rows = {row.row: row for row in runner.run(plan).rows}
        beside.history += rows[0].token_ids
        assert (rows[1].token_ids, rows[1].num_computed) == ([], length - 1)
        plan = StepPlan(0, [], [], [], [], [Decode(0, 1), Decode(1, 1)])
    go_on.set()
    waiting.added, waiting.chunks = [], []
    assert waiting.run().output == alone.output
    assert beside.run(8).output == free.output


def test_masks_allow_what_may_come_at_each_line(config, tokenizer, make_runner):
    """Against the library's own matcher, fed draft by draft."""
    seen = []

    class Watched(StructuredOutputManager):
        def start_masks(self, lines, known):
            masks = super().start_masks(lines, known)
            if masks is not None:
                seen.append((lines, masks))
            return masks

    drafts = tokenizer.tokenize_str('{"name"')
    runner = make_runner(Repeats(*drafts), Watched(lambda: tokenizer, VOCAB_SIZE))
    grammar = to_grammar("regex", '.*"name".*')
    row = Row(runner, prompt_of(tokenizer), SEEDED, grammar, max_drafts=6)
    row.step()
    row.step()
    lines, masks = seen[-1]
    assert len(lines) == 1 + len(drafts)
    assert masks.sampled == list(range(len(lines)))
    matcher = compile_grammar(tokenizer, grammar)
    matcher.consume_tokens(row.output[:1])
    for words, draft in zip(masks.words.result(), [*drafts, None], strict=True):
        assert words.tobytes() == matcher.compute_bitmask()[: words.nbytes]
        if draft is not None:
            assert matcher.consume_token(draft)


def test_rows_without_a_grammar_are_unaffected(make_runner, tokenizer):
    runner = make_runner()
    free = Row(make_runner(), prompt_of(tokenizer), SEEDED, "").run(20)
    beside = Row(runner, prompt_of(tokenizer), SEEDED, "", number=1)
    beside.step()
    Row(runner, prompt_of(tokenizer), SEEDED, JSON).run()
    assert beside.run(20).output == free.output


@pytest.mark.parametrize(
    ("kind", "text"),
    [("choices", '["<|im_end|>"]'), ("regex", r"<\|im_end\|>"), ("json_schema", '{"const": "<|im_end|>"}')],
)
def test_what_spells_a_special_token_is_text(make_runner, tokenizer, kind, text):
    grammar = to_grammar(kind, text, {"<|im_end|>": 4095})
    row = Row(make_runner(), prompt_of(tokenizer), SEEDED, grammar).run()
    assert tokenizer.decode_str(row.output[:-1]).strip('"') == "<|im_end|>"


def test_errors_contain_no_caller_text():
    said = 'at 1(8): invalid regex "canary-of-mine" and "not", canaries'
    assert discreet(said, "canary-of-mine not: regexes") == 'at 1(8): invalid regex "…" and "not", canaries'


def test_what_is_not_understood_is_never_passed_over(tokenizer):
    schema = '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'
    with pytest.raises(GrammarError, match="uniqueItems"):
        compile_grammar(tokenizer, to_grammar("json_schema", schema))


def libraries():
    """By kind: byte-level BPE, and Unigram with byte fallback, each with a token of its own and one that is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "ab", "<a>", "<b>"]
    bpe = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[("a", "b")]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "ab", "<a>", "<b>"]
    unigram = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    unigram.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return {"bpe": bpe, "unigram": unigram}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("configured", [[], ["<new>"], ["<a>"], ["<b>", "<new>", "<a>", "<nowhere>"]])
def test_tokens_that_a_configuration_names_are_special(kind, configured, tmp_path):
    library = libraries()[kind]
    library.add_special_tokens(["<b>"])
    library.add_tokens([tokenizers.AddedToken("<new>", lstrip=True, normalized=False)])
    library.enable_truncation(2)
    library.enable_padding(length=40)
    library.save(str(tmp_path / "tokenizer.json"))
    size = library.get_vocab_size()

    found = read_tokenizer(str(tmp_path), configured, size, [0])

    # As the library that made the file marks them.
    library.no_truncation()
    library.no_padding()
    library.add_special_tokens([token for token in configured if library.token_to_id(token) is not None])
    expected = LLTokenizer(library.to_str(), n_vocab=size, eos_token=[0])
    special = {i for i in range(size) if expected.is_special_token(i)}
    assert special >= {library.token_to_id(name) for name in {"<b>", *configured} - {"<nowhere>"}}
    assert {i for i in range(size) if found.is_special_token(i)} == special
    for token_id in range(size):
        assert found.decode_bytes([token_id]) == expected.decode_bytes([token_id])
    text = "ab <a><b> <new> abab"
    assert found.tokenize_str(text) == expected.tokenize_str(text)


@pytest.mark.parametrize("max_drafts", [0, 8])
@pytest.mark.parametrize("pattern", ["hello( world)?", "(hello){3}", "<hi>|hello"])
def test_tokens_that_the_model_lacks_are_never_chosen_or_drafted(backend, tmp_path, pattern, max_drafts):
    """They have larger ids than the model has rows; other tokens spell the same text."""
    alphabet = {name: i for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(vocab={**alphabet, "<eos>": 256}, merges=[]))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_tokens(["hello", " world"])
    library.save(str(tmp_path / "tokenizer.json"))
    known = read_tokenizer(str(tmp_path), ["<eos>"], 260, [256], [(259, "<hi>")])
    assert max(compile_grammar(known, to_grammar("regex", pattern)).compute_ff_tokens(), default=257) >= 257
    grammar = to_grammar("regex", pattern, forces=False)
    runner = Runner(backend, None, StructuredOutputManager(lambda: known, 257))
    row = Row(runner, [65, 66], SEEDED, grammar, max_drafts=max_drafts)
    while 256 not in row.output:
        row.step()
        assert not row.failure
    text = row.output[: row.output.index(256)]
    assert max(text) < 256
    assert re.fullmatch(pattern, known.decode_str(text))
