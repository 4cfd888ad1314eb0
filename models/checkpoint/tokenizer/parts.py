"""Parts of a tokenizer.json that tokenizers of several kinds have."""

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

Part = dict[str, Any]
"""A part of a tokenizer.json."""
NamedToken = tuple[str, int]
"""A token and its id."""

MAX_AREA = 1 << 26
"""Limit on the sum of the squares of the tokens' lengths where merges are found by cutting tokens in two."""
BYTE_LEVEL_DECODER: Part = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
BYTE_LEVEL: Part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
"""Turns the bytes of a text into letters."""


def byte_letters() -> dict[int, str]:
    """Returns the letter that stands for each byte in the tokens of byte-level tokenizers: itself if it is printable in
    Latin-1, and otherwise the next one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def split_words(*patterns: str) -> Part:
    """Returns a pre-tokenizer that cuts a text by each regular expression in turn, and then turns its bytes into
    letters."""
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*cuts, BYTE_LEVEL]}


def bpe(vocab: Mapping[str, int], merges: list[tuple[str, str]], **options: Any) -> Part:
    """Returns a BPE model. ``options`` replace the library's defaults."""
    defaults: Part = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", "dropout": None, **defaults, **options, "vocab": vocab, "merges": merges}


def find_merges(vocab: Mapping[str, int], scores: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Finds the merges that the scores of tokens stand for: all pairs of tokens in ``vocab`` that make a token, those
    of tokens with high scores first (transformers' ``generate_merges``). Raises ValueError if this would take too
    long."""
    if sum(len(token) ** 2 for token in vocab) > MAX_AREA:
        raise ValueError("its tokens are too long together")
    merges = []
    for token, score in scores:
        found = [
            (left, right)
            for at in range(1, len(token))
            if (left := token[:at]) in vocab and (right := token[at:]) in vocab
        ]
        found.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in found]
    merges.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [merge[3:] for merge in merges]


def added_token(token_id: int, content: str, special: bool, normalized: bool = False) -> Part:
    """Returns a token that is found in a text before the text is cut."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized}
    return {"id": token_id, "content": content, **flags, "special": special}


def surround(begin: NamedToken | None, end: NamedToken | None) -> Part | None:
    """Returns the part that adds tokens around a text. None if it adds none."""
    if begin is None and end is None:
        return None

    def template(name: str, type_id: int) -> list[Part]:
        before, after = ([] if each is None else [special(each, type_id)] for each in (begin, end))
        return [*before, {"Sequence": {"id": name, "type_id": type_id}}, *after]

    def special(token: NamedToken, type_id: int) -> Part:
        return {"SpecialToken": {"id": token[0], "type_id": type_id}}

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": [*template("A", 0), *template("B", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [token_id], "tokens": [name]} for name, token_id in filter(None, (begin, end))
        },
    }
