"""Log-probabilities in the formats of the two endpoints, and of vLLM for prompts."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from penstock.clients.events import Delta
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.prompts import ParsedPrompt
from penstock.clients.output import Logprobs

LOWEST = -9999.0
"""Represents minus infinity, for which JSON has no number; the same as in vLLM."""
_REPLACEMENT = "\ufffd"


class Token(NamedTuple):
    """A token, with the bytes that it adds to a text."""

    id: int
    text: bytes


class TokenNames:
    """The names of tokens in an answer."""

    def __init__(self, *, as_ids: bool) -> None:
        """``as_ids``: names have the form "token_id:N"."""
        self._as_ids = as_ids

    def text(self, token: Token) -> str:
        """Returns the text for chats: incomplete characters become U+FFFD."""
        return f"token_id:{token.id}" if self._as_ids else token.text.decode(errors="replace")

    def key(self, token: Token, shown: str = "") -> str:
        """Returns the name for completions: bytes of incomplete characters are written out, so that names are distinct.
        ``shown``: the part of the text that begins in the token; next to invalid bytes, a byte that is a character may
        be shown as U+FFFD."""
        if self._as_ids:
            return f"token_id:{token.id}"
        data = token.text
        try:
            name = data.decode()
        except UnicodeDecodeError:
            name = ""
        is_broken = not name or (shown.strip(_REPLACEMENT) == "" != shown and _REPLACEMENT not in name)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if data and is_broken else name


def chat_entries(token_ids: Sequence[int], logprobs: Logprobs, names: TokenNames) -> list[Json]:
    """Returns one entry per token, in chat's format."""

    def entry(token: Token, logprob: float) -> Json:
        return {"token": names.text(token), "logprob": _finite(logprob), "bytes": list(token.text)}

    return [
        entry(token, chosen) | {"top_logprobs": [entry(*each) for each in top]}
        for token, chosen, top in _by_token(token_ids, logprobs)
    ]


class ChoiceLists:
    """Builds the parallel lists of a completion's choice; tracks the offset of the next token in the text."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._offset = 0
        self._text_length = 0

    @staticmethod
    def begin_prompt(prompt: ParsedPrompt, text: bytes, names: TokenNames) -> Json:
        """Returns the lists for a prompt's first token, which has no log-probabilities. ``text`` is the token's
        text."""
        assert prompt.text is not None
        assert prompt.token_ids is not None
        begin, end = (*prompt.text_offsets[:2], len(prompt.text))[:2]
        name = names.key(Token(prompt.token_ids[0], text), prompt.text[begin:end])
        return {"text_offset": [begin], "token_logprobs": [None], "tokens": [name], "top_logprobs": [None]}

    @staticmethod
    def add_prompt(prompt: ParsedPrompt, start: int, logprobs: Logprobs, names: TokenNames) -> Json:
        """Returns the lists for a prompt's tokens from ``start`` on."""
        assert prompt.text is not None
        assert prompt.token_ids is not None
        end = start + len(logprobs.chosen)
        token_ids, offsets = prompt.token_ids[start:end], prompt.text_offsets[start:end]
        ends = [*prompt.text_offsets[start + 1 : end + 1], len(prompt.text)]
        shown = [prompt.text[begin:end] for begin, end in zip(offsets, ends, strict=False)]
        return _lists(offsets, shown, token_ids, logprobs, names)

    def after(self, text: str) -> None:
        """Advances the offset by a text that precedes the output."""
        self._offset = self._text_length = len(text)

    def resume(self, num_chars: int, *, has_tokens: bool) -> None:
        """Advances to where a caller's copy of the output ends. ``has_tokens``: whether it has the tokens, too;
        otherwise all of them follow."""
        self._text_length = num_chars
        self._offset = num_chars if has_tokens else 0

    def add_tokens(self, delta: Delta, logprobs: Logprobs, text: str, names: TokenNames) -> Json:
        """Returns the lists of a delta's tokens. The last tokens may be a stop that is not in the text: their offset is
        its end."""
        base, self._text_length = self._text_length, self._text_length + len(text)
        offsets = list(accumulate(logprobs.text_lengths, initial=self._offset))
        shown = [text[max(0, begin - base) : max(0, end - base)] for begin, end in pairwise(offsets)]
        self._offset = offsets.pop()
        if delta.end is not None:
            offsets = [min(offset, self._text_length) for offset in offsets]
        return _lists(offsets, shown, delta.token_ids, logprobs, names)


def _lists(
    text_offsets: Sequence[int],
    shown: Sequence[str],
    token_ids: Sequence[int],
    logprobs: Logprobs,
    names: TokenNames,
) -> Json:
    """``shown``: the part of the text that begins in each token."""
    tokens, top_logprobs = [], []
    for text, (token, chosen, top) in zip(shown, _by_token(token_ids, logprobs), strict=True):
        tokens.append(names.key(token, text))
        # The chosen token is included even if it is not among the likeliest.
        alternatives: dict[str, float] = {}
        for each, logprob in (*top, (token, chosen)):
            name = tokens[-1] if each.id == token.id else names.key(each)
            alternatives.setdefault(name, _finite(logprob))
        top_logprobs.append(alternatives)
    return {
        "text_offset": list(text_offsets),
        "token_logprobs": list(map(_finite, logprobs.chosen)),
        "tokens": tokens,
        "top_logprobs": top_logprobs,
    }


def prompt_entries(token_ids: Sequence[int], logprobs: Logprobs, names: TokenNames) -> list[Json]:
    """Returns entries in vLLM's format: by token id, with the rank if known."""
    entries = []
    for token, chosen, top in _by_token(token_ids, logprobs):
        ranked = enumerate(top, start=1)
        entry = {str(each.id): _prompt_entry(each, logprob, rank, names) for rank, (each, logprob) in ranked}
        entry.setdefault(str(token.id), _prompt_entry(token, chosen, None, names))
        entries.append(entry)
    return entries


def _prompt_entry(token: Token, logprob: float, rank: int | None, names: TokenNames) -> Json:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(token)}


def _by_token(token_ids: Sequence[int], logprobs: Logprobs) -> Iterator[tuple[Token, float, list[tuple[Token, float]]]]:
    """Yields each token, its log-probability, and its alternatives with theirs."""
    k = logprobs.num_top
    chosen = zip(token_ids, logprobs.chosen_texts, logprobs.chosen, strict=True)
    for at, (token_id, text, logprob) in enumerate(chosen):
        span = slice(at * k, at * k + k)
        tops = map(Token, logprobs.top_token_ids[span], logprobs.top_texts[span])
        yield Token(token_id, text), logprob, list(zip(tops, logprobs.top[span], strict=True))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
