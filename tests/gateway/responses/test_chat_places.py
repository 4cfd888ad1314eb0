"""Which tokens an answer's content is made of."""

import pytest

from penstock.clients.gateway.responses.chat_places import ContentTokens
from penstock.clients.output import Logprobs


def placed(tokens, lengths, sizes=None, text_length=99):
    """The places of the content's tokens, each with the token's number, of a choice that comes in parts of ``sizes``
    tokens."""
    content, found, begin = ContentTokens(), [], 0
    for size in sizes or [len(tokens)]:
        ids, some = range(begin, begin + size), lengths[begin : begin + size]
        at = sum(lengths[:begin])
        span = range(at, min(at + sum(some), text_length))
        logprobs = Logprobs(text_lengths=some, chosen_texts=tokens[begin : begin + size])
        entries = content.place_entries(logprobs, [{"at": number} for number in ids], span)
        found.append([(place, entry["at"]) for place, entry in entries])
        begin += size
    return found


@pytest.mark.parametrize(
    ("tokens", "lengths", "expected"),
    [
        ([b"a", b"b", b"c"], [1, 1, 1], [(0, 0), (1, 1), (2, 2)]),
        ([b"<t>", b"a", b"b"], [0, 1, 1], [(0, 1), (1, 2)]),
        ([b"a", b"<t>", b"b"], [1, 0, 1], [(0, 0), (1, 2)]),
        # A token that is content in part.
        ([b">a", b"b<"], [1, 1], [(0, 0), (1, 1)]),
        # A character in several tokens, and several in one.
        ([b"h", b"\xc3", b"\xa9", b"!"], [0, 1, 0, 0], [(0, 1), (0, 2)]),
        ([b"\xf0\x9f", b"\xa6\x80\xc3", b"\xa9"], [1, 1, 0], [(0, 0), (0, 1), (1, 2)]),
        # Of reasoning.
        ([b"\xc3", b"\xa9", b"a"], [0, 0, 1], [(0, 2)]),
    ],
)
def test_a_token_is_of_the_content_if_any_of_its_text_is(tokens, lengths, expected):
    assert placed(tokens, lengths) == [expected]


def test_places_are_those_in_the_part():
    tokens, lengths = [b"<t>", b"ab", b"\xc3", b"\xa9", b"</t>", b"c"], [0, 2, 1, 0, 0, 1]
    assert placed(tokens, lengths, [2, 2, 2]) == [[(0, 1)], [(0, 2), (0, 3)], [(0, 5)]]


def test_what_a_stop_string_cut_is_no_content():
    assert placed([b"ab", b"cd", b"ef"], [2, 2, 2], text_length=3) == [[(0, 0), (2, 1)]]
