"""Incremental text equals the text decoded at once, and no stop string ever shows."""

import sys
import tempfile
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from penstock.scheduler.request import TextDelta
from penstock.service.text.detokenizer import IdsOnly, text_offsets, text_states
from penstock.service.text.stop_strings import StopStrings, StopWatch
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.tokenizer_config import TokenizerError

CORPUS = ["the cat sat on the mat, the end. naïve 你好世界 你们好 🙂🙃 <end> the theme  and  more\n\nlines\n"] * 4
SPECIALS = ["<s>", "</s>"]


def finished(library):
    library.add_special_tokens(SPECIALS)
    library.add_tokens([AddedToken("<think>", special=False), AddedToken("a b", special=False), "é"])
    with tempfile.TemporaryDirectory() as directory:
        library.save(f"{directory}/tokenizer.json")
        return Tokenizer(Path(directory))


def byte_level():
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return finished(library)


def sentencepiece(*decoder_steps):
    """As Llama 2 and Mistral were converted: spaces are marks, unknown characters are bytes."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for piece in ["▁", "▁▁", "▁the", "▁cat", "th", "e", "a", "t", ".", "▁<", "end", ">", "你", "\n", "�"]:
        vocab[piece] = len(vocab)
    library = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), *decoder_steps])
    return finished(library)


def metaspace(prepend_scheme):
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    library.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    return finished(library)


def without_decoder():
    words = ["the", "cat", "<unk>", ".", " ", ""]
    library = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    return finished(library)


KINDS = {
    "byte-level": byte_level(),
    "llama": sentencepiece(decoders.Fuse(), decoders.Strip(" ", 1, 0)),
    "gemma": sentencepiece(decoders.Fuse()),
    "metaspace": metaspace("first"),
    "metaspace-never": metaspace("never"),
    "no-decoder": without_decoder(),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def feed(state, token_ids):
    """All releases, until a stop string; then what ``finish`` releases."""
    released = []
    for token_id in token_ids:
        released.append(state.feed(token_id))
        if released[-1].stop is not None:
            return released
    return [*released, state.finish()]


def text_of(released):
    return "".join(part.text for part in released)


def ids_of(tokenizer, max_size=40):
    special = sorted(tokenizer.special_ids)
    split = sorted(tokenizer.pieces.split) or [0]
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    return st.lists(any_id | st.sampled_from(split) | st.sampled_from(special), max_size=max_size)


@every_kind
@settings(max_examples=150, deadline=None)
@given(data=st.data(), include_special_tokens=st.booleans())
def test_the_parts_together_are_the_text_decoded_at_once(kind, data, include_special_tokens):
    tokenizer = KINDS[kind]
    token_ids = data.draw(ids_of(tokenizer))
    released = feed(text_states(tokenizer, (), include_special_tokens)(), token_ids)
    assert text_of(released) == tokenizer.decode(token_ids, include_special_tokens)
    assert sum(part.num_tokens for part in released) == len(token_ids)


@settings(max_examples=300, deadline=None)
@given(ids_of(KINDS["byte-level"]))
def test_a_release_is_the_text_of_its_own_tokens(token_ids):
    """Each part's tokens, decoded by themselves, are the part: so none ends in the middle of a character."""
    tokenizer = KINDS["byte-level"]
    begin = 0
    for part in feed(text_states(tokenizer)(), token_ids):
        assert tokenizer.decode(token_ids[begin : begin + part.num_tokens]) == part.text
        begin += part.num_tokens
    assert begin == len(token_ids)


@every_kind
@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_ordinary_text_comes_back(kind, text):
    tokenizer = KINDS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert text_of(feed(text_states(tokenizer)(), token_ids)) == tokenizer.decode(token_ids)


def first_stop(text, stops):
    """Where the text is to be cut, and by which stop string, the slow way."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace"])
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_where_they_would_in_the_whole_text(kind, data):
    tokenizer = KINDS[kind]
    token_ids = data.draw(ids_of(tokenizer))
    text = tokenizer.decode(token_ids)
    piece = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 5))
    stops = {text[begin : begin + length] for begin, length in data.draw(st.lists(piece, max_size=3))}
    stops |= set(data.draw(st.lists(st.text("the <nd>\n�", min_size=1, max_size=4), max_size=3)))
    stops.discard("")
    expected, stop = first_stop(text, stops)
    released = feed(text_states(tokenizer, sorted(stops))(), token_ids)
    assert text_of(released) == expected
    assert released[-1].stop == stop
    # What was let go before the end can be no part of a stop string that was still open.
    num_released = sum(part.num_tokens for part in released)
    assert num_released <= len(token_ids)
    if stop is None:
        assert num_released == len(token_ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", max_size=5), max_size=8), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_the_watch_keeps_the_longest_possible_beginning_and_no_more(parts, stops):
    watch = StopWatch(StopStrings(stops))
    text = ""
    for part in parts:
        text += part
        if watch.find(part) is not None:
            assert first_stop(text, stops)[1] is not None
            return
        assert first_stop(text, stops)[1] is None
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        assert watch.depth == max((len(b) for b in beginnings if text.endswith(b)), default=0)


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=6), max_size=12))
def test_any_number_of_stop_strings_are_found_as_one_by_one(text, stops):
    expected, stop = first_stop(text, stops)
    found = StopWatch(StopStrings(stops)).find(text)
    if found is None:
        assert (expected, stop) == (text, None)
    else:
        assert (text[: found[0] - len(found[1])], found[1]) == (expected, stop)


def lines_run(work):
    """How many lines of Python it takes: a measure of work that no other load changes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_search_costs_the_texts_length_whatever_the_stop_strings_are():
    text = ("e" * 999 + "x") * 5

    def cost(*stops):
        watch = StopWatch(StopStrings(stops))
        return lines_run(lambda: watch.find(text))

    one = cost("zz")
    assert one >= len(text)
    assert cost(*("e" * 1000 + chr(0x4E00 + i) for i in range(64))) < 5 * one
    assert cost(*("e" * i + "y" for i in range(1, 65))) < 5 * one


def test_the_longest_allowed_stop_strings_are_kept_small():
    """A queued request holds its automaton: 64 KiB of stop strings must not become megabytes."""
    stops = [chr(0x4E00 + i) + "".join(chr(0x5000 + (i * j) % 997) for j in range(1023)) for i in range(64)]
    made = StopStrings(stops)
    kept = [made.next_char, made.depth, made.complete, made.shorter, made.branches]
    assert sum(map(sys.getsizeof, kept)) < 1 << 20
    assert len(made.branches) < 64
    assert StopWatch(made).find("x" + stops[63]) == (1025, stops[63])


def spelled(tokenizer, *tokens):
    return [tokenizer._library.token_to_id(token) for token in tokens]


def plain(released):
    """Without the places of its tokens."""
    return released._replace(lengths=None)


def test_a_stop_string_across_tokens_is_held_and_never_shows():
    tokenizer = KINDS["llama"]
    state = text_states(tokenizer, ["<end>"])()
    the, lower, end, greater = spelled(tokenizer, "▁the", "▁<", "end", ">")
    assert state.feed(the) == TextDelta(1, "the")
    assert state.feed(lower) == TextDelta(0, "")
    assert state.feed(end) == TextDelta(0, "")
    assert plain(state.feed(greater)) == TextDelta(1, " ", "<end>")


def test_what_was_no_stop_string_after_all_is_released():
    tokenizer = KINDS["llama"]
    state = text_states(tokenizer, ["<end>"])()
    lower, end, cat = spelled(tokenizer, "▁<", "end", "▁cat")
    assert state.feed(lower).num_tokens == 0
    assert state.feed(end).num_tokens == 0
    assert plain(state.feed(cat)) == TextDelta(3, "<end cat")


def test_a_stop_string_inside_one_token():
    tokenizer = KINDS["llama"]
    state = text_states(tokenizer, ["n"])()
    (end,) = spelled(tokenizer, "end")
    assert plain(state.feed(end)) == TextDelta(1, "e", "n")


def test_of_overlapping_stop_strings_the_first_complete_one_wins_then_the_longest():
    tokenizer = KINDS["llama"]
    (the, end) = spelled(tokenizer, "▁the", "end")
    assert plain(text_states(tokenizer, ["hex", "the", "he", "e"])().feed(the)) == TextDelta(0, "", "the")
    assert plain(text_states(tokenizer, ["h", "the"])().feed(the)) == TextDelta(1, "t", "h")
    state = text_states(tokenizer, ["ndt", "nde"])()
    assert state.feed(end).num_tokens == 0
    assert plain(state.feed(end)) == TextDelta(1, "e", "nde")


def test_a_character_split_over_tokens_comes_whole():
    tokenizer = KINDS["byte-level"]
    face = tokenizer.encode("🤔", add_special_tokens=False)
    assert len(face) > 1
    state = text_states(tokenizer)()
    assert [state.feed(token_id) for token_id in face[:-1]] == [TextDelta(0, "")] * (len(face) - 1)
    assert plain(state.feed(face[-1])) == TextDelta(len(face), "🤔")


def test_an_unfinished_character_ends_as_a_replacement():
    tokenizer = KINDS["byte-level"]
    *begun, _ = tokenizer.encode("🤔", add_special_tokens=False)
    state = text_states(tokenizer)()
    assert {state.feed(token_id).text for token_id in begun} == {""}
    assert plain(state.finish()) == TextDelta(len(begun), "�")


def test_a_stop_string_of_bytes_that_end_with_the_output_still_cuts():
    tokenizer = KINDS["llama"]
    state = text_states(tokenizer, ["🙂"])()
    the, *face = spelled(tokenizer, "▁the", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>")
    assert state.feed(the) == TextDelta(1, "the")
    assert {state.feed(token_id).num_tokens for token_id in face} == {0}
    assert plain(state.finish()) == TextDelta(0, "", "🙂")


def test_a_long_run_of_broken_beginnings_is_not_held():
    tokenizer = KINDS["byte-level"]
    (begin,) = (token_id for token_id, data in tokenizer.pieces.split.items() if data == b"\xe2")
    state = text_states(tokenizer)()
    released = [state.feed(begin) for _ in range(100)]
    assert released[0] == TextDelta(0, "")
    assert released[1:] == [TextDelta(1, "�")] * 99


def test_choices_share_their_stop_strings_but_not_their_state():
    tokenizer = KINDS["llama"]
    make_text = text_states(tokenizer, ["the end"])
    first, second = make_text(), make_text()
    (the,) = spelled(tokenizer, "▁the")
    assert first.feed(the).num_tokens == 0
    assert second.finish() == TextDelta(0, "")
    assert first.finish() == TextDelta(1, "the")


@every_kind
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_places_of_tokens_are_those_of_their_texts(kind, data):
    """However the tokens come, and whatever of them is broken, their lengths make up the text; and where all of it is
    text, each token's own text stands at its place."""
    tokenizer = KINDS[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    include = data.draw(st.booleans())
    offsets = text_offsets(tokenizer, token_ids, include)
    text = tokenizer.decode(token_ids, include)
    assert len(offsets) == len(token_ids)
    assert offsets == sorted(offsets)
    assert not offsets or offsets[0] == 0
    pieces = tokenizer.pieces.all if include else tokenizer.pieces.ordinary
    for at, (token_id, offset) in enumerate(zip(token_ids, offsets, strict=True)):
        end = offsets[at + 1] if at + 1 < len(offsets) else len(text)
        piece = pieces[token_id]
        if piece is not None and at:
            assert text[offset:end] in (piece, piece.removeprefix(" "), piece.lstrip(" "))


def test_a_character_of_several_tokens_begins_in_the_first():
    tokenizer = KINDS["byte-level"]
    face = tokenizer.encode("🤔", add_special_tokens=False)
    (after,) = tokenizer.encode(".", add_special_tokens=False)
    assert text_offsets(tokenizer, [*face, after]) == [0, *[1] * len(face)]
    assert text_offsets(tokenizer, face[1:]) == list(range(len(face) - 1))  # each is a U+FFFD of its own


def test_broken_bytes_of_sentencepiece_are_a_character_each():
    tokenizer = KINDS["llama"]
    the, cat = spelled(tokenizer, "▁the", "▁cat")
    day = spelled(tokenizer, "<0xE6>", "<0x97>", "<0xA5>")
    assert text_offsets(tokenizer, [the, *day, cat]) == [0, 3, 4, 4, 4]
    assert text_offsets(tokenizer, [the, *day, day[0], cat]) == [0, 3, 4, 5, 6, 7]
    assert tokenizer.decode([the, *day, day[0], cat]) == "the���� cat"


def test_the_space_that_a_text_loses_is_in_no_token():
    tokenizer = KINDS["llama"]
    the, cat = spelled(tokenizer, "▁the", "▁cat")
    assert text_offsets(tokenizer, [the, cat]) == [0, 3]
    begin = tokenizer._library.token_to_id("<s>")
    assert text_offsets(tokenizer, [begin, the, cat]) == [0, 0, 3]
    assert text_offsets(tokenizer, [begin, the, cat], True) == [0, 3, 7]


def test_the_tokens_of_a_stop_string_have_their_places_too():
    tokenizer = KINDS["llama"]
    state = text_states(tokenizer, ["<end>"])()
    the, lower, end, greater = spelled(tokenizer, "▁the", "▁<", "end", ">")
    released = [state.feed(token_id) for token_id in (the, lower, end, greater)]
    assert [part.text_lengths() for part in released] == [(3,), (), (), (2, 3, 1)]


def test_ids_only_holds_nothing():
    state = IdsOnly()
    assert state.feed(5) == TextDelta(1, "")
    assert state.finish() == TextDelta(0, "")


def test_a_decoder_without_tables_is_refused_by_name():
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b</w>": 1}, []))
    library.decoder = decoders.BPEDecoder()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: decoder BPEDecoder is not supported"):
        finished(library)
