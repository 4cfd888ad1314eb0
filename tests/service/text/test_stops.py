"""Stop strings beside special tokens and ``min_tokens``."""

import pytest

from penstock.service.text.detokenizer import text_states

from .test_text import KINDS


def read(tokenizer, token_ids, stops, include_special_tokens=False, min_tokens=0):
    """The text as it comes, and how it ends: after how many tokens, and by which stop string."""
    state = text_states(tokenizer, stops, include_special_tokens, min_tokens)()
    texts, num_released = [], 0
    for number, token_id in enumerate(token_ids, start=1):
        released = state.feed(token_id)
        texts.append(released.text)
        num_released += released.num_tokens
        if released.stop is not None:
            return texts, number, released.stop
    released = state.finish()
    texts.append(released.text)
    assert released.stop is not None or num_released + released.num_tokens == len(token_ids)
    return texts, len(token_ids), released.stop


def special(tokenizer):
    [token_id] = [each for each in tokenizer.special_ids if tokenizer.decode([each], True).strip() == "</s>"]
    return token_id


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_a_stop_string_may_name_a_special_token(kind, include):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("the cat", add_special_tokens=False)
    end = special(tokenizer)
    shown = tokenizer.decode(ids)
    for stops, number, text in (
        (["</s>"], len(ids) + 1, shown),
        (["t</s>"], len(ids) + 1, shown[:-1]),
        (["</s>cat"], None, None),
        (["</s>", "dog"], len(ids) + 1, shown),
    ):
        texts, read_tokens, stop = read(tokenizer, [*ids, end, *ids], stops, include)
        if number is None:
            assert stop is None
            assert "".join(texts) == tokenizer.decode([*ids, end, *ids], include)
        else:
            assert ("".join(texts), read_tokens, stop) == (text, number, stops[0])


def test_a_stop_string_may_go_on_after_a_special_token():
    tokenizer = KINDS["byte-level"]
    ids, end = tokenizer.encode("the cat", add_special_tokens=False), special(tokenizer)
    texts, _, stop = read(tokenizer, [*ids, end, *ids], ["</s>the"])
    assert ("".join(texts), stop) == ("the cat", "</s>the")
    texts, _, stop = read(tokenizer, [*ids, end, *ids], ["</s>them"])
    assert ("".join(texts), stop) == ("the catthe cat", None)
    # Another special token leaves no trace.
    texts, _, stop = read(tokenizer, [*ids, end, *ids], ["catthe", "<s>"])
    assert ("".join(texts), stop) == ("the ", "catthe")


def test_a_named_special_token_inside_a_character():
    tokenizer = KINDS["byte-level"]
    smile = tokenizer.encode("\N{UPSIDE-DOWN FACE}", add_special_tokens=False)
    if len(smile) == 1:
        pytest.skip("it is one token")
    texts, number, stop = read(tokenizer, [smile[0], special(tokenizer), *smile[1:]], ["</s>"])
    assert ("".join(texts), number, stop) == ("", 2, "</s>")


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_no_stop_string_ends_an_output_before_min_tokens(kind):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("the the the", add_special_tokens=False) * 3
    _, first, _ = read(tokenizer, ids, ["e"])
    assert first < len(ids)
    for min_tokens in range(len(ids) + 1):
        texts, number, stop = read(tokenizer, ids, ["e"], min_tokens=min_tokens)
        assert number > min_tokens or stop is None
        if stop is None:
            assert "".join(texts) == tokenizer.decode(ids)
        else:
            assert tokenizer.decode(ids[:number]).startswith("".join(texts) + "e")


def test_a_stop_string_that_begins_before_min_tokens_counts():
    tokenizer = KINDS["byte-level"]
    ids = [token_id for char in "xabcx" for token_id in tokenizer.encode(char, add_special_tokens=False)]
    assert len(ids) == 5
    texts, number, stop = read(tokenizer, ids, ["abc", "xa"], min_tokens=3)
    assert ("".join(texts), number, stop) == ("x", 4, "abc")
