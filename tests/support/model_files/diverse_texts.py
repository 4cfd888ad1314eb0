"""Texts of many kinds, to compare tokenizers: scripts, code, spaces, symbols, and bytes that are no text."""

import random
import unicodedata
from collections.abc import Iterator

_TEXT = """
the quick brown fox jumps over lazy dogs and don't we'll I'M isn't CamelCase HTTPServer snake_case naïve Ångström Füße
Здравствуй мир Привет עולם مرحبا नमस्ते สวัสดี 你好 世界 日本語 テスト ｶﾞｷﾞ ｱ 안녕하세요 한국 Việt ế ệ 1234567 3.14 1,000
x=y; {} [] () <s> </s> <unk> [INST] [/INST] <0x41> <|im_start|> ▁ ▁▁x ½ Ⅻ ﬁ ① ㍿ ～ 🙂 🚀 👩‍👩‍👧 🇩🇪
==== ---- #### //// .... !!!! \\n \\\\ "q" 'q' http://a.b/c?d=e#f user@host.org $9.99 C++ <p>x</p> &amp;
"""
WORDS = _TEXT.split()
CODE = [
    'def f(x: int) -> str:\n    return f"{x!r}"  # ok\n\n\tpass\n',
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i] * b[i];\r\n}\n",
    '{"a": [1, 2.5e-3, null], "b": {"c": "\\u00e9"}}\n',
    "SELECT * FROM t WHERE a >= 10 AND b LIKE '%x%';  --  comment",
    '<!DOCTYPE html>\n<div class="a  b">\n        text</div>\n',
    "$ ls -la | grep '^d' && echo \"$HOME\" >> /tmp/x 2>&1",
]
SPACES = [" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2003", "\u200b", "\ufeff", "\x0b", "\x85", "\u2028"]
MARKS = [chr(code) for code in (0x300, 0x301, 0x302, 0x303, 0x308, 0x30A, 0x323, 0x327, 0x3099, 0x309A, 0x200D, 0xFE0F)]
BLOCKS = [
    (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x400), (0x400, 0x500), (0x590, 0x5F5), (0x600, 0x6D4), (0x900, 0x980),
    (0xE01, 0xE3B), (0x1100, 0x1200), (0x1E00, 0x1F00), (0x2000, 0x2070), (0x2100, 0x2190), (0x2190, 0x2300),
    (0x2460, 0x2500), (0x3040, 0x3100), (0x3300, 0x3400), (0x4E00, 0x9FA6), (0xAC00, 0xD7A4), (0xFB00, 0xFB07),
    (0xFF01, 0xFF9E), (0x1D400, 0x1D455), (0x1F300, 0x1F650), (0x20000, 0x20100),
]  # fmt: skip


def diverse_texts(number: int, seed: int = 1, any_marks: bool = True) -> list[str]:
    """Returns different texts of up to about 400 characters; the same for the same seed. ``any_marks``: with accents
    where no language has them."""
    texts: dict[str, None] = {}
    for text in _texts(random.Random(seed), any_marks):
        texts[text] = None
        if len(texts) == number:
            return list(texts)
    raise AssertionError("there is always another text")


def _texts(generator: random.Random, any_marks: bool) -> Iterator[str]:
    yield from ("", " ", "\n", "a", *WORDS, *CODE, *SPACES)
    yield from (space * count for space in SPACES for count in (2, 3, 7, 17))
    makers = [_words, _block, _mixed_blocks, _runs, _bytes, _decomposed, _code, *([_marked] if any_marks else [])]
    while True:
        for make in makers:
            yield make(generator)


def _words(generator: random.Random) -> str:
    words = generator.choices(WORDS, k=generator.randrange(1, 40))
    return "".join(f"{word}{generator.choice([' ', ' ', ' ', '', *SPACES])}" for word in words)


def _block(generator: random.Random) -> str:
    return "".join(_characters(generator, generator.choice(BLOCKS), generator.randrange(1, 60)))


def _mixed_blocks(generator: random.Random) -> str:
    parts = [_characters(generator, generator.choice(BLOCKS), generator.randrange(1, 8)) for _ in range(12)]
    return generator.choice(["", " ", "\n"]).join(map("".join, parts))


def _runs(generator: random.Random) -> str:
    kinds = [*"aAx0 =-_.~\n\t#▁", "ab", "  x", "ha", "🙂", "漢", "é", "\r\n"]
    return "".join(generator.choice(kinds) * generator.randrange(1, 30) for _ in range(generator.randrange(1, 6)))


def _bytes(generator: random.Random) -> str:
    data = generator.randbytes(generator.randrange(1, 60))
    return data.decode(generator.choice(["latin-1", "utf-8", "utf-16-le", "cp1251"]), errors="replace")


def _decomposed(generator: random.Random) -> str:
    """Text whose accents are characters of their own."""
    return unicodedata.normalize("NFD", _words(generator))


def _marked(generator: random.Random) -> str:
    return "".join(base + generator.choice(MARKS) * generator.randrange(2) for base in _words(generator))


def _code(generator: random.Random) -> str:
    lines = "".join(generator.choices(CODE, k=2)).splitlines(keepends=True)
    return "".join(" " * generator.randrange(0, 20) + line for line in generator.sample(lines, k=len(lines)))


def _characters(generator: random.Random, block: tuple[int, int], number: int) -> list[str]:
    characters = [chr(generator.randrange(*block)) for _ in range(number)]
    return [each for each in characters if unicodedata.category(each) not in ("Cn", "Cs")]
