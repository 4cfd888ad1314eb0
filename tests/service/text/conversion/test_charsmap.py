"""A damaged table of replaced characters is refused, or does no harm."""

import random

import pytest
from texts.diverse_texts import diverse_texts
from tokenizers import normalizers

from penstock.service.text.charsmap import check_charsmap, longest_replacement
from penstock.service.text.conversion.convert import SENTENCEPIECE
from penstock.service.text.conversion.sentencepiece_proto import parse_model

from .conftest import train


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """SentencePiece's own."""
    directory = tmp_path_factory.mktemp("charsmap")
    train(directory)
    model = parse_model((directory / SENTENCEPIECE).read_bytes())
    return model.normalizer_spec.precompiled_charsmap


def test_sentencepieces_own_table_is_sound(table):
    check_charsmap(table)
    assert longest_replacement(table) == len("صلى الله عليه وسلم".encode())


def test_a_damaged_table_never_ends_in_a_panic(table):
    generator = random.Random(1)
    texts = diverse_texts(100)
    size = 4 + int.from_bytes(table[:4], "little")
    num_sound = 0
    for _ in range(30):
        changed = bytearray(table)
        changed[generator.randrange(4, size)] ^= 1 << generator.randrange(8)
        damaged = bytes(changed)
        try:
            check_charsmap(damaged)
        except ValueError:
            continue
        num_sound += 1
        library = normalizers.Precompiled(damaged)
        for text in texts:
            library.normalize_str(text)
    assert 5 < num_sound < 25


@pytest.mark.parametrize("cut", [b"", b"\0\0", (0).to_bytes(4, "little"), (1 << 31).to_bytes(4, "little") + bytes(99)])
def test_what_is_no_table_is_refused(cut):
    with pytest.raises(ValueError, match="precompiled_charsmap is damaged: its trie is cut off"):
        check_charsmap(cut)


def test_replacements_are_in_the_table(table):
    size = 4 + int.from_bytes(table[:4], "little")
    with pytest.raises(ValueError, match="it lacks a replacement"):
        check_charsmap(table[: size + 10])
