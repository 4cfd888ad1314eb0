"""Log-probabilities in the shapes of the two endpoints, and of vLLM for prompts. Knows no requests."""

from collections.abc import Iterator, Mapping, Sequence

from penstock.clients.events import Logprobs
from penstock.clients.gateway.json_object import Json
from penstock.v1.tokenizer_pb2 import TokenDescription

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has no number for; so does vLLM."""


class TokenNames:
    """What tokens are called in an answer."""

    def __init__(self, known: Mapping[int, TokenDescription], *, as_ids: bool) -> None:
        """``known`` has every token that is asked for. ``as_ids``: named "token_id:N"."""
        self._known = known
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """As chats have it: bytes that are no character become U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self.bytes(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """As completions have it: bytes that are no character are written out, so that they stay apart."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self.bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes(self, token_id: int) -> bytes:
        """What it adds to a text."""
        return self._known[token_id].text

    def shown(self, token_id: int, *, specials: bool) -> str:
        """What it adds to a text with or without special tokens."""
        hidden = self._known[token_id].is_special and not specials
        return "" if hidden else self.bytes(token_id).decode(errors="replace")

    def num_characters(self, token_id: int, *, specials: bool) -> int:
        """How many characters of the text begin in it; ``specials``: whether special tokens are in the text."""
        token = self._known[token_id]
        if token.is_special and not specials:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in token.text)


def named_ids(token_ids: Sequence[int], logprobs: Logprobs) -> set[int]:
    """The tokens that a shape of these will name."""
    return {*token_ids, *logprobs.top_token_ids}


def cut(logprobs: Logprobs, num_top: int) -> Logprobs:
    """The same with at most so many alternatives."""
    if logprobs.num_top <= num_top:
        return logprobs
    ids: list[int] = []
    values: list[float] = []
    for begin in range(0, len(logprobs.top), logprobs.num_top):
        ids += logprobs.top_token_ids[begin : begin + num_top]
        values += logprobs.top[begin : begin + num_top]
    return Logprobs(logprobs.chosen, num_top, ids, values)


def chat_entries(token_ids: Sequence[int], logprobs: Logprobs, names: TokenNames) -> list[Json]:
    """One entry a token, as chats have it."""

    def entry(token_id: int, logprob: float) -> Json:
        return {"token": names.text(token_id), "logprob": _finite(logprob), "bytes": list(names.bytes(token_id))}

    return [
        entry(token_id, chosen) | {"top_logprobs": [entry(*each) for each in top]}
        for token_id, chosen, top in _by_token(token_ids, logprobs)
    ]


class CompletionEntries:
    """The parallel lists of a choice of completions; remembers where in the text the next token begins."""

    def __init__(self, *, specials: bool) -> None:
        self._specials = specials
        self._offset = 0

    def add(self, token_ids: Sequence[int], logprobs: Logprobs, names: TokenNames) -> Json:
        """What more tokens add to the lists."""
        lists = self._empty()
        for token_id, chosen, top in _by_token(token_ids, logprobs):
            # The chosen token is there whether it is among the likeliest or not.
            alternatives: dict[str, float] = {}
            for each, logprob in (*top, (token_id, chosen)):
                alternatives.setdefault(names.key(each), _finite(logprob))
            self._append(lists, token_id, _finite(chosen), alternatives, names)
        return lists

    def first_of_prompt(self, token_id: int, names: TokenNames) -> Json:
        """The lists of a prompt's first token, which has no log-probability."""
        lists = self._empty()
        self._append(lists, token_id, None, None, names)
        return lists

    def _empty(self) -> Json:
        return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}

    def _append(
        self, lists: Json, token_id: int, logprob: float | None, top: dict[str, float] | None, names: TokenNames
    ) -> None:
        lists["text_offset"].append(self._offset)
        lists["token_logprobs"].append(logprob)
        lists["tokens"].append(names.key(token_id))
        lists["top_logprobs"].append(top)
        self._offset += names.num_characters(token_id, specials=self._specials)


def prompt_entries(token_ids: Sequence[int], logprobs: Logprobs, names: TokenNames) -> list[Json]:
    """vLLM's form: by token id, with the rank where it is known."""
    entries = []
    for token_id, chosen, top in _by_token(token_ids, logprobs):
        entry: Json = {}
        for rank, (each, logprob) in enumerate(top, start=1):
            entry[str(each)] = _prompt_entry(each, logprob, rank, names)
        if str(token_id) not in entry:
            entry[str(token_id)] = _prompt_entry(token_id, chosen, None, names)
        entries.append(entry)
    return entries


def _prompt_entry(token_id: int, logprob: float, rank: int | None, names: TokenNames) -> Json:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": names.text(token_id)}


def _by_token(token_ids: Sequence[int], logprobs: Logprobs) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Each token, its log-probability, and its alternatives with theirs."""
    k = logprobs.num_top
    for at, (token_id, chosen) in enumerate(zip(token_ids, logprobs.chosen, strict=True)):
        span = slice(at * k, at * k + k)
        yield token_id, chosen, list(zip(logprobs.top_token_ids[span], logprobs.top[span], strict=True))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
