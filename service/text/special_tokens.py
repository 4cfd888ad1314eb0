"""Prevents callers from writing special tokens: text that looks like one is ordinary text, unless the chat template
wrote it. Depends on details of the tokenizers library.
"""

import re
import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import groupby

import tokenizers

from penstock.service.chat_templates.text import runs
from penstock.service.config.text_size import utf8_bytes
from penstock.service.text.prompt_limit import PromptLimit
from penstock.service.text.truncation import Truncation

_WINDOW_CHARS = 16 << 10
_USUAL_CHARS_PER_TOKEN = 8
"""More than in usual texts. If a text is too long even at this ratio, its number of tokens is estimated first."""
_BYTES_AT_ONCE = 1 << 20
"""Longer texts are always estimated first: each of their bytes may be a token."""
_ESTIMATE_SLACK, _MAX_ESTIMATE_SLACK = 1024, 1 << 17
"""Margins of the estimate. It splits words at the ends of windows, which changes a few tokens, so it refuses a text
only if that has twice as many tokens as the limit and the first number, or the second number more than the limit."""


class SpecialTokenGuard:
    """Encodes special tokens only where the template wrote them.

    The library is set to read special tokens as text. Where the template has one, an alias replaces it: an added token
    with the same flags (such as which spaces around it belong to it), whose name a caller cannot guess. So one call
    encodes a whole prompt, and the tokenizer sees the context of each word.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[int, tokenizers.AddedToken]) -> None:
        """Adds the aliases to ``tokenizer``, above its own ids."""
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._id_of = {token.content: token_id for token_id, token in special_tokens.items()}
        any_of_them = _any_of(sorted(self._id_of)) if self._id_of else "(?!)"
        self._templates = re.compile(any_of_them)
        self._beginnings = re.compile(f"(?=(?:{any_of_them}))(.)", re.DOTALL)
        self.longest_name = max(map(len, self._id_of), default=0)
        """Length of the longest special token, in characters."""
        self.takes_spaces = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
        """Whether a token may include any number of spaces around it."""
        secret = f"\U0010fffd{secrets.token_hex(8)}"
        self._alias_of: dict[str, str] = {}
        self._single_words = frozenset(token.content for token in special_tokens.values() if token.single_word)
        for token in special_tokens.values():
            alias = self._alias_of[token.content] = _alias(token, secret)
            flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            tokenizer.add_tokens([tokenizers.AddedToken(alias, **flags)])
        self._splitter = f"{secret}.split"
        tokenizer.add_tokens([tokenizers.AddedToken(self._splitter, normalized=False)])
        self._alias_ids = frozenset(tokenizer.token_to_id(alias) for alias in self._alias_of.values())
        self._splitter_id = tokenizer.token_to_id(self._splitter)
        self._splits = any(token_id in self._ids(content, False) for content, token_id in self._id_of.items())
        """Whether the model also has a special token as an ordinary piece, as Unigram and word-level models may. Then
        text that looks like one is split."""

    def encode(
        self, text: str, add_special_tokens: bool, *, follows: bool = False, limit: PromptLimit | None = None
    ) -> list[int]:
        """Returns the ids of a caller's text. With ``add_special_tokens``, the tokenizer adds its own around a prompt.
        With ``follows``, it adds no space at the beginning, as some tokenizers do. Raises ServiceError if there are
        more ids than ``limit`` allows."""
        if not self._splits and not follows:
            return self._ids(text, add_special_tokens, limit)
        split, num_splitters = self._split(text)
        if follows:
            split = self._splitter + split
            num_splitters += 1
        ids = self._ids(split, add_special_tokens, limit, num_splitters)
        return [token_id for token_id in ids if token_id != self._splitter_id]

    def encode_pair(
        self, first: str, second: str, truncation: Truncation | None = None, limit: PromptLimit | None = None
    ) -> list[int]:
        """Returns the ids of two texts of a caller as the tokenizer joins them. ``truncation`` cuts the longer one
        first, and keeps the tokens that the tokenizer adds. Raises ServiceError if there are more ids than ``limit``
        allows."""
        encodings = []
        for text in (first, second):
            split, num_splitters = self._split(text)
            if limit is not None and self._has_far_too_many(split, limit.max_new_tokens + num_splitters):
                limit.refuse()
            encodings.append(self._encoding(split, False))
        one, other = encodings
        if limit is not None:
            limit.check_at_least(len(one) + len(other))
        if truncation is not None:
            room = truncation.max_tokens - self._tokenizer.num_special_tokens_to_add(True)
            direction = "right" if truncation.keeps_first else "left"
            for encoding, most in zip(encodings, _shares(room, len(one), len(other)), strict=True):
                encoding.truncate(most, direction=direction)
        joined = self._tokenizer.post_process(one, other, True)
        ids = [token_id for token_id in joined.ids if token_id != self._splitter_id]
        return ids if truncation is None else truncation.cut(ids)

    def shortened(self, text: str, num_tokens: int, keeps_first: bool) -> str:
        """Returns a text without its last, or first, ``num_tokens`` tokens; empty if it has no more."""
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        num_kept = len(encoding) - num_tokens
        if num_kept < 1:
            return ""
        span = encoding.token_to_chars(num_kept - 1 if keeps_first else num_tokens)
        assert span is not None, "each of these tokens comes from the text"
        return text[: span[1]] if keeps_first else text[span[0] :]

    def encode_template(self, rendered: str, *, follows: bool = False, limit: PromptLimit | None = None) -> list[int]:
        """Returns the ids of a rendered template, with special tokens only in the template's own text. ``follows``: as
        for ``encode``. Raises ServiceError if there are more ids than ``limit`` allows."""
        parts = list(runs(rendered))
        whole = "".join(text for text, _ in parts)
        special_ids: list[int] = []
        aliased: list[str] = []
        num_chars = 0

        def alias(match: re.Match[str]) -> str:
            if match[0] in self._single_words and _touches_word(
                whole, num_chars + match.start(), num_chars + match.end()
            ):
                return match[0]
            special_ids.append(self._id_of[match[0]])
            return self._alias_of[match[0]]

        for text, is_own in parts:
            aliased.append(self._templates.sub(alias, text) if is_own else text)
            num_chars += len(text)
        in_order = iter(special_ids)
        encoded = self.encode("".join(aliased), False, follows=follows, limit=limit)
        ids = [next(in_order) if token_id in self._alias_ids else token_id for token_id in encoded]
        assert next(in_order, None) is None, "each special token of the template is one token of the prompt"
        return ids

    def _split(self, text: str) -> tuple[str, int]:
        """Returns a text in which no special token is left, and the number of splitters that this takes."""
        if not self._splits:
            return text, 0
        # A function, since with a replacement text re would hash the whole pattern each time.
        return self._beginnings.subn(lambda beginning: beginning[1] + self._splitter, text)

    def _ids(
        self, text: str, add_special_tokens: bool, limit: PromptLimit | None = None, num_splitters: int = 0
    ) -> list[int]:
        """Returns the ids of a text. ``num_splitters`` of them are the splitter's, and do not count. Raises
        ServiceError."""
        if limit is not None and self._has_far_too_many(text, limit.max_new_tokens + num_splitters):
            limit.refuse()
        encoding = self._encoding(text, add_special_tokens)
        if limit is not None:
            # Before the list is made: one of millions takes 100 MB, and Python's lock for as many milliseconds.
            limit.check(len(encoding) - num_splitters)
        ids: list[int] = encoding.ids
        return ids

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # A batch, because the library holds Python's lock, and so the event loop, while it encodes a single text.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _has_far_too_many(self, text: str, max_tokens: int) -> bool:
        """Returns whether a very long text has many more tokens than ``max_tokens``. Encodes it in windows: the whole
        text could take seconds, and hundreds of bytes per token."""
        most_bytes = max(_WINDOW_CHARS, min(_BYTES_AT_ONCE, _USUAL_CHARS_PER_TOKEN * max_tokens))
        if self.takes_spaces or utf8_bytes(text) <= most_bytes:
            return False
        most = max_tokens + min(max_tokens + _ESTIMATE_SLACK, _MAX_ESTIMATE_SLACK)
        num_tokens = 0
        for start in range(0, len(text), _WINDOW_CHARS):
            num_tokens += len(self._encoding(text[start : start + _WINDOW_CHARS], False))
            if num_tokens > most:
                return True
        return False


def _shares(room: int, first: int, second: int) -> tuple[int, int]:
    """Returns how many tokens of two texts to keep so that they have at most ``room`` together: the longer is cut until
    both are equal, then both, as transformers does it."""
    room = max(0, room)
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


def _any_of(texts: Sequence[str]) -> str:
    """Returns a pattern that matches the longest of some sorted texts. Branches share common beginnings, so that
    thousands cost little more than one."""
    first, last = texts[0], texts[-1]
    num_common = next((at for at, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), len(first))
    rest = [text[num_common:] for text in texts]
    branches = [_any_of(list(alike)) for _, alike in groupby(filter(None, rest), key=lambda text: text[0])]
    may_end = "?" if "" in rest and branches else ""
    return re.escape(first[:num_common]) + (f"(?:{'|'.join(branches)}){may_end}" if branches else "")


def _alias(token: tokenizers.AddedToken, secret: str) -> str:
    """Returns the alias, which is the same for all tokens that a tokenizer handles in the same way. It begins and ends
    with a letter if the token does, since that matters to a single word next to it."""
    flags = f"{token.single_word:d}{token.lstrip:d}{token.rstrip:d}{token.normalized:d}"
    first, last = ("a" if _is_word(token.content[at]) else "\U0010fffd" for at in (0, -1))
    return f"{first}{secret}.{flags}{last}"


def _touches_word(text: str, start: int, end: int) -> bool:
    """Returns whether a letter is right before or after ``text[start:end]``, which is then not a single word."""
    return any(map(_is_word, text[max(0, start - 1) : start] + text[end : end + 1]))


def _is_word(character: str) -> bool:
    r"""Returns whether ``\w`` matches the character in the library's regular expressions."""
    category = unicodedata.category(character)
    return category[0] in "LM" or category in ("Nd", "Nl", "Pc") or character in _OTHER_WORDS


_OTHER_WORDS = frozenset("\u200c\u200d") | frozenset(
    chr(code)
    for first, last in ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
    for code in range(first, last + 1)
)
"""Joiners, and symbols that count as letters."""
