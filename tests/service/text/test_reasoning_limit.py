"""How reasoning with a limit is closed: compares the worker's tracker, with each format's markers as the service
encodes them, with the parsers that read the output."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from thinker import write_thinker

from penstock.models.batch.reasoning_tracker import ReasoningTracker
from penstock.scheduler.reasoning_limit import ReasoningLimit
from penstock.service.parsers.reasoning import REASONING_FORMATS
from penstock.service.parsers.registry import make_parser
from penstock.service.text.reasoning import _search
from penstock.service.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[3] / "models" / "demo"
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|return|>", "<|call|>")
MODELS: dict[str, tuple[str, Sequence[str]]] = {
    "think": ("think", ("<think>", "</think>")),
    "think as text": ("think", ()),
    "mistral": ("mistral", ("[THINK]", "[/THINK]")),
    "gemma4": ("gemma4", ("<|channel>", "<channel|>")),
    "harmony": ("harmony", HARMONY_MARKS),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Tokenizer) -> Callable[[Sequence[str]], Tokenizer]:
    def load(marks: Sequence[str]) -> Tokenizer:
        path = tmp_path_factory.mktemp("marks")
        return Tokenizer(write_thinker(path, byte_tokenizer.directory, "", marks, are_special=True))

    return load


def limit_of(tokenizer: Tokenizer, name: str, *, calls_may_follow: bool = False) -> ReasoningLimit:
    reasoning = tokenizer.reasoning.with_format(REASONING_FORMATS[name])
    return reasoning.limit(tokenizer.pieces, tokenizer.encode_after, calls_may_follow=calls_may_follow)


def limited(limit: ReasoningLimit, max_tokens: int, is_open: bool) -> ReasoningLimit:
    return ReasoningLimit(max_tokens, is_open, limit.closes, limit.closing, limit.opens)


def output(tracker: ReasoningTracker, prompt: list[int], wanted: Sequence[int]) -> list[int]:
    """The tokens that a model wants, besides those that are forced."""
    history = list(prompt)
    for token_id in wanted:
        forced = tracker.forced_token(history, len(history))
        assert tracker.may_force(history, len(history)) == (forced is not None)
        history.append(token_id if forced is None else forced)
    return history[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_parsers_find_reasoning_of_at_most_that_many_tokens(load: Callable[..., Tokenizer], name: str) -> None:
    """Random texts with markers, whole and in parts. With one token for each byte, the number of tokens is that of the
    characters."""
    form, marks = MODELS[name]
    tokenizer = load(marks)
    whole = limit_of(tokenizer, form)
    opens, closes = REASONING_FORMATS[form].opens, REASONING_FORMATS[form].closes
    rng = random.Random(1)
    num_forced = num_free = 0
    for _ in range(150):
        parts = [opens if rng.random() < 0.7 else "", *rng.choices(["ab", closes, closes[:-1], closes[:2], "\n"], k=9)]
        wanted = [each for part in parts for each in tokens_of(tokenizer, part)] + tokens_of(tokenizer, "x" * 60)
        is_open, budget = rng.random() < 0.5, rng.choice([0, 1, 2, 5, 9, 14, 30])
        wanted = wanted[len(tokens_of(tokenizer, parts[0])) :] if is_open else wanted
        found = output(ReasoningTracker(limited(whole, budget, is_open), 2), [1, 2], wanted)
        num_forced += found != wanted
        num_free += found == wanted
        parser = make_parser(None, form, in_reasoning=is_open)
        parsed = parser.feed(tokenizer.decode(found, include_special_tokens=True)) + parser.end()
        assert len(parsed.reasoning) <= budget, (parts, budget)
        assert closes not in parsed.content or closes in "".join(parts)
    assert num_forced > 20
    assert num_free > 20


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, with marks as tokens."""
    marks = [mark for mark in tokenizer.marker_ids if mark in text]
    if not marks:
        return tokenizer.encode_after(text)
    before, mark, after = text.partition(marks[0])
    return [*tokens_of(tokenizer, before), tokenizer.marker_ids[mark], *tokens_of(tokenizer, after)]


def test_harmony_closes_in_a_message_or_before_a_call(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(HARMONY_MARKS)
    text = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert limit_of(tokenizer, "harmony").closing == (tuple(tokens_of(tokenizer, text)),)
    assert limit_of(tokenizer, "harmony", calls_may_follow=True).closing == (tuple(tokens_of(tokenizer, "<|end|>")),)


def test_all_messages_of_analysis_count_together(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(HARMONY_MARKS)
    limit = limited(limit_of(tokenizer, "harmony", calls_may_follow=True), 5, False)
    thought = "<|channel|>analysis<|message|>"
    wanted = tokens_of(tokenizer, f"{thought}abc<|end|><|start|>assistant{thought}abcdef")
    found = tokenizer.decode(output(ReasoningTracker(limit, 0), [], wanted), include_special_tokens=True)
    assert found == f"{thought}abc<|end|><|start|>assistant{thought}ab<|end|>def"


def test_a_marker_that_was_begun_is_completed(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(())
    limit = limited(limit_of(tokenizer, "think"), 5, True)
    found = output(ReasoningTracker(limit, 0), [], tokenizer.encode_after("abc</xxxxxxxxxxx"))
    assert tokenizer.decode(found) == "abc</think>xxxxx"


def test_drafts_and_unknown_tokens(load: Callable[..., Tokenizer]) -> None:
    tokenizer = load(("<think>", "</think>"))
    closes, opens = tokenizer.marker_ids["</think>"], tokenizer.marker_ids["<think>"]
    tracker = ReasoningTracker(limited(limit_of(tokenizer, "think"), 3, True), 1)
    history = [9, 1, 2]
    assert [tracker.forced_token(history, 3, drafts) for drafts in ([], [4], [4, closes])] == [None, closes, None]
    assert tracker.forced_token(history, 3, [closes, 5]) is None
    assert not tracker.may_force([9, 1, -1], 3)
    assert tracker.may_force([9, 1, -1, -1], 4)
    assert tracker.may_force([9, 1, 2, -1], 4)
    assert tracker.forced_token([9, 1, 2, 3, closes], 4) == closes  # later tokens are known already
    assert tracker.forced_token([9, 1, 2], 3) is None  # and a step before them
    assert not tracker.may_force([9, 1, 2, 3, closes, -1, -1, -1], 8)
    far = ReasoningTracker(limited(limit_of(tokenizer, "think"), 6, True), 1)
    assert not far.may_force(history, 3, range(3)), "and no draft is read"
    histories = {(-1,): False, (-1, -1): True, (opens, -1): True, (ord("a"), -1, -1): False}
    for known, may_force in histories.items():
        tracker = ReasoningTracker(limited(limit_of(tokenizer, "think"), 1, False), 0)
        assert tracker.may_force(known, len(known)) == may_force


@pytest.mark.parametrize("marker", ["</think>", "[/THINK]", "aab", "<|channel|>analysis<|message|>"])
def test_markers_are_found_in_tokens_of_any_length(marker: str) -> None:
    """With the tokens of the demo model, which are parts of words, and those that have parts of the marker."""
    table = Tokenizer(DEMO).pieces
    search = _search(marker, table)
    beginning = _search(marker, table, at_beginning=True)
    others = [token_id for token_id, text in enumerate(table.all) if text]
    likely = [
        token_id for token_id, text in enumerate(table.all) if text and any(text in marker[at:] for at in range(9))
    ]
    assert len(likely) > 2
    rng = random.Random(1)
    for _ in range(300):
        state, first, text = 0, 0, ""
        token_ids = rng.choices([*likely, rng.choice(others)], k=12)
        if rng.random() < 0.3:
            token_ids = [token_id for part in marker for token_id, text_of in enumerate(table.all) if text_of == part]
        for token_id in token_ids:
            text += table.all[token_id] or ""
            state = state if state == search.length else search.move(state, token_id)
            if 0 <= first < search.length:
                first = beginning.move(first, token_id)
            assert (state == search.length) == (marker in text)
            assert state == search.length or text.endswith(marker[:state])
            begun = text.lstrip()
            assert (first >= 0) == (begun.startswith(marker) or marker.startswith(begun))
