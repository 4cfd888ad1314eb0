"""Which tokens an answer's content is made of."""

import itertools

import pytest

from penstock.clients.gateway.responses.chat_places import ContentTokens
from penstock.clients.gateway.responses.logprobs import TokenNames
from penstock.v1 import TokenDescription


def taken(tokens, spans, text=None, *, one_by_one=False, specials=False):
    """The numbers of the tokens that stand there, and where; ``None`` is a special token."""
    described = [
        TokenDescription(text=b"<end>" if token is None else token, is_special=token is None) for token in tokens
    ]
    names = TokenNames(dict(enumerate(described)), as_ids=False)
    places = ContentTokens(specials=specials)
    ids = range(len(tokens))
    deltas = [[at] for at in ids] if one_by_one else [list(ids)]
    for delta in deltas:
        shown = b"".join(names.bytes(at) for at in delta if specials or tokens[at] is not None).decode()
        places.add_tokens(shown if text is None else text, delta, [{"at": at} for at in delta], names)
    return [(at, entry["at"]) for at, entry in itertools.chain(*(places.take_entries((span,)) for span in spans))]


@pytest.mark.parametrize(
    ("tokens", "spans", "expected"),
    [
        ([b"a", b"b", b"c"], [(0, 3)], [(0, 0), (1, 1), (2, 2)]),
        ([b"<t>", b"a", b"b"], [(3, 5)], [(0, 1), (1, 2)]),
        ([b"a", b"<t>", b"b"], [(0, 1), (4, 5)], [(0, 0), (0, 2)]),
        # A token that is content in part: it belongs to what of it comes first.
        ([b">a", b"b<"], [(1, 3)], [(0, 0), (1, 1)]),
        ([b"ab"], [(0, 1), (1, 2)], [(0, 0)]),
        # A character in several tokens, and several in one.
        ([b"h", b"\xc3", b"\xa9", b"!"], [(1, 2)], [(0, 1), (0, 2)]),
        ([b"\xf0\x9f", b"\xa6\x80\xc3", b"\xa9"], [(0, 2)], [(0, 0), (0, 1), (1, 2)]),
        ([b"a", None, b"b"], [(0, 2)], [(0, 0), (1, 2)]),
    ],
)
def test_a_token_is_of_the_content_if_any_of_its_text_is(tokens, spans, expected):
    assert taken(tokens, spans) == expected


def test_it_does_not_matter_how_many_tokens_come_at_once():
    tokens, spans = [b"<t>", b"a", b"b", b"</t>", b"c", None], [(3, 5), (9, 10)]
    assert taken(tokens, spans) == taken(tokens, spans, one_by_one=True) == [(0, 1), (1, 2), (0, 4)]


def test_special_tokens_that_are_shown_take_their_place():
    assert taken([None, b"a"], [(5, 6)], specials=True) == [(0, 1)]


def test_what_a_stop_string_cut_is_no_content():
    assert taken([b"ab", b"cd", b"ef"], [(0, 3)], text="abc") == [(0, 0), (2, 1)]
