"""Log-probabilities in the formats of the two endpoints, and of vLLM for prompts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from penstock.clients.events import Delta, Logprobs
from penstock.clients.gateway.json_object import Json
from penstock.clients.gateway.requests.prompts import ParsedPrompt
from penstock.v1 import TokenDescription

LOWEST = -9999.0
"""Represents minus infinity, for which JSON has no number; the same as in vLLM."""
_REPLACEMENT = "\ufffd"


class TokenNames:
    """The names of tokens in an answer."""

    def __init__(self, known: Mapping[int, TokenDescription], *, as_ids: bool) -> None:
        """``known`` has every token that will be named. ``as_ids``: names have the form "token_id:N"."""
        self._known = known
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """Returns the text for chats: incomplete characters become U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self.bytes(token_id).decode(errors="replace")

    def key(self, token_id: int, shown: str = "") -> str:
        """Returns the name for completions: bytes of incomplete characters are written out, so that names are distinct.
        ``shown``: the part of the text that begins in the token; next to invalid bytes, a byte that is a character may
        be shown as U+FFFD."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self.bytes(token_id)
        try:
            name = data.decode()
        except UnicodeDecodeError:
            name = ""
        is_broken = not name or (shown.strip(_REPLACEMENT) == "" != shown and _REPLACEMENT not in name)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if data and is_broken else name

    def bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to a text."""
        return self._known[token_id].text

    def shown(self, token_id: int, *, specials: bool) -> str:
        """Returns what the token adds to a text with or without special tokens."""
        hidden = self._known[token_id].is_special and not specials
        return "" if hidden else self.bytes(token_id).decode(errors="replace")


def named_ids(token_ids: Sequence[int], logprobs: Logprobs) -> set[int]:
    """Returns the tokens to be named."""
    return {*token_ids, *logprobs.top_token_ids}


def cut(logprobs: Logprobs, num_top: int) -> Logprobs:
    """Returns log-probabilities with at most ``num_top`` alternatives."""
    if logprobs.num_top <= num_top:
        return logprobs
    ids: list[int] = []
    values: list[float] = []
    for begin in range(0, len(logprobs.top), logprobs.num_top):
        ids += logprobs.top_token_ids[begin : begin + num_top]
        values += logprobs.top[begin : begin + num_top]
    return Logprobs(logprobs.chosen, num_top, ids, values)


def chat_entries(token_ids: Sequence[int], logprobs: Logprobs, names: TokenNames) -> list[Json]:
    """Returns one entry per token, in chat's format."""

    def entry(token_id: int, logprob: float) -> Json:
        return {"token": names.text(token_id), "logprob": _finite(logprob), "bytes": list(names.bytes(token_id))}

    return [
        entry(token_id, chosen) | {"top_logprobs": [entry(*each) for each in top]}
        for token_id, chosen, top in _by_token(token_ids, logprobs)
    ]


class ChoiceLists:
    """Builds the parallel lists of a completion's choice; tracks the offset of the next token in the text."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._offset = 0
        self._text_length = 0

    @staticmethod
    def add_prompt(prompt: ParsedPrompt, start: int, logprobs: Logprobs | None, names: TokenNames) -> Json:
        """Returns the lists of a prompt's tokens from ``start`` on. Only the first token has no log-probabilities:
        None."""
        assert prompt.text is not None
        assert prompt.token_ids is not None
        end = start + (1 if logprobs is None else len(logprobs.chosen))
        token_ids, offsets = prompt.token_ids[start:end], prompt.text_offsets[start:end]
        ends = [*prompt.text_offsets[start + 1 : end + 1], len(prompt.text)]
        shown = [prompt.text[begin:end] for begin, end in zip(offsets, ends, strict=False)]
        if logprobs is not None:
            return _lists(offsets, shown, token_ids, logprobs, names)
        tokens = [names.key(token_id, text) for token_id, text in zip(token_ids, shown, strict=True)]
        return {"text_offset": list(offsets), "token_logprobs": [None], "tokens": tokens, "top_logprobs": [None]}

    def after(self, text: str) -> None:
        """Advances the offset by a text that precedes the output."""
        self._offset = self._text_length = len(text)

    def add_tokens(self, delta: Delta, logprobs: Logprobs, text: str, names: TokenNames) -> Json:
        """Returns the lists of a delta's tokens. The last tokens may be a stop that is not in the text: their offset is
        its end."""
        base, self._text_length = self._text_length, self._text_length + len(text)
        offsets = list(accumulate(logprobs.text_lengths, initial=self._offset))
        shown = [text[begin - base : end - base] for begin, end in pairwise(offsets)]
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
    for text, (token_id, chosen, top) in zip(shown, _by_token(token_ids, logprobs), strict=True):
        tokens.append(names.key(token_id, text))
        # The chosen token is included even if it is not among the likeliest.
        alternatives: dict[str, float] = {}
        for each, logprob in (*top, (token_id, chosen)):
            name = tokens[-1] if each == token_id else names.key(each)
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
    for token_id, chosen, top in _by_token(token_ids, logprobs):
        ranked = enumerate(top, start=1)
        entry = {str(each): _prompt_entry(each, logprob, rank, names) for rank, (each, logprob) in ranked}
        entry.setdefault(str(token_id), _prompt_entry(token_id, chosen, None, names))
        entries.append(entry)
    return entries


def _prompt_entry(token_id: int, logprob: float, rank: int | None, names: TokenNames) -> Json:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(token_id)}


def _by_token(token_ids: Sequence[int], logprobs: Logprobs) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Yields each token, its log-probability, and its alternatives with theirs."""
    k = logprobs.num_top
    for at, (token_id, chosen) in enumerate(zip(token_ids, logprobs.chosen, strict=True)):
        span = slice(at * k, at * k + k)
        yield token_id, chosen, list(zip(logprobs.top_token_ids[span], logprobs.top[span], strict=True))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
