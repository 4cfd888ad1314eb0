"""Keeps special tokens out of callers' hands: what looks like one is text, unless the chat template wrote it.

Knows one library and its habits; nothing of templates.
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import tokenizers

from penstock.service.template_text import runs


class Specials:
    """Tells a caller's text from the template's, whatever the template does with it.

    The library is set to read special tokens as text. Where the template has one, an alias stands for it: an added
    token with the same habits (which spaces around it are taken), whose name no caller can guess. So one call encodes a
    whole prompt, and all that a tokenizer looks at beyond a single word is as it should be.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, specials: Mapping[int, tokenizers.AddedToken]) -> None:
        """Adds the aliases to ``tokenizer``, above its own ids."""
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._id_of = {token.content: token_id for token_id, token in specials.items()}
        any_of_them = _any_of(sorted(self._id_of)) if self._id_of else "(?!)"
        self._templates = re.compile(any_of_them)
        self._beginnings = re.compile(f"(?=(?:{any_of_them}))(.)", re.DOTALL)
        secret = f"\U0010fffd{secrets.token_hex(8)}"
        self._alias_of: dict[str, str] = {}
        for token in specials.values():
            alias = f"{secret}.{token.lstrip:d}{token.rstrip:d}{token.normalized:d}"
            self._alias_of[token.content] = alias
            tokenizer.add_tokens(
                [tokenizers.AddedToken(alias, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized)]
            )
        self._splitter = f"{secret}.split"
        tokenizer.add_tokens([tokenizers.AddedToken(self._splitter, normalized=False)])
        self._alias_ids = frozenset(tokenizer.token_to_id(alias) for alias in self._alias_of.values())
        self._splitter_id = tokenizer.token_to_id(self._splitter)
        self._splits = any(token_id in self._ids(content, False) for content, token_id in self._id_of.items())
        """Whether the model knows a special token as an ordinary piece too, as Unigram and word-level ones may: then
        text that looks like one is split."""

    def encode(self, text: str, add_special_tokens: bool, *, follows: bool = False) -> list[int]:
        """Ids of a caller's text; ``add_special_tokens`` is about those that the tokenizer puts around a prompt.
        ``follows``: it is no beginning, where some tokenizers add a space."""
        if not self._splits and not follows:
            return self._ids(text, add_special_tokens)
        # A function, since a template of text would have the library hash the whole pattern each time.
        split = self._beginnings.sub(lambda beginning: beginning[1] + self._splitter, text) if self._splits else text
        if follows:
            split = self._splitter + split
        return [token_id for token_id in self._ids(split, add_special_tokens) if token_id != self._splitter_id]

    def encode_template(self, rendered: str, *, follows: bool = False) -> list[int]:
        """Ids of what a template rendered, with special tokens in text of its own alone; ``follows``: something comes
        before it."""
        special_ids: list[int] = []

        def alias(match: re.Match[str]) -> str:
            special_ids.append(self._id_of[match[0]])
            return self._alias_of[match[0]]

        parts = (self._templates.sub(alias, text) if is_own else text for text, is_own in runs(rendered))
        in_order = iter(special_ids)
        encoded = self.encode("".join(parts), False, follows=follows)
        ids = [next(in_order) if token_id in self._alias_ids else token_id for token_id in encoded]
        assert next(in_order, None) is None, "each special token of the template is one token of the prompt"
        return ids

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch, because the library holds Python's lock, and so the event loop, while it encodes a single text.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def _any_of(texts: Sequence[str]) -> str:
    """A pattern for any of some sorted texts, the longest that fits. What they begin with is common to a branch, so
    that thousands cost little more than one."""
    first, last = texts[0], texts[-1]
    num_common = next((at for at, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), len(first))
    rest = [text[num_common:] for text in texts]
    branches = [_any_of(list(alike)) for _, alike in groupby(filter(None, rest), key=lambda text: text[0])]
    may_end = "?" if "" in rest and branches else ""
    return re.escape(first[:num_common]) + (f"(?:{'|'.join(branches)}){may_end}" if branches else "")


def named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json has a name for: bos_token, eos_token and so on."""
    named = {}
    for name in _NAMES:
        content = _content(config.get(name))
        if content:
            named[name] = content
    return named


def unnamed_tokens(config: Mapping[str, object]) -> Iterable[str]:
    """The special tokens that tokenizer_config.json merely lists."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(key)
        values: Sequence[object] = ()
        if isinstance(listed, dict):
            values = list(listed.values())
        elif isinstance(listed, list):
            values = listed
        yield from filter(None, map(_content, values))


_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _content(value: object) -> str:
    """A token as a configuration has it: its text, or an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
