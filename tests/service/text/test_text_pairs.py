"""Pairs of texts are joined and cut as by transformers."""

import json

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from penstock.service.errors import ServiceError
from penstock.service.text.prompt_limit import PromptLimit
from penstock.service.text.text_pairs import TextPairs
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.truncation import Truncation

PAIRS = [("a b", "the document"), ("a long query, longer than", "this"), ("", "x"), ("same", "size"), ("abcde", "abcd")]


@pytest.fixture(scope="module", params=["plain", "both ends", "unigram"])
def directory(request, tmp_path_factory):
    """Tokenizers that add nothing, that add tokens around and between texts, and that have special tokens as pieces."""
    path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "unigram":
        pieces = [
            ("<unk>", 0.0),
            ("<s>", -1.0),
            ("</s>", -1.0),
            *((char, -2.0) for char in "abcdefghijklmnopqrstuvwxyz ,<>/"),
        ]
        library = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
        library.decoder = decoders.Fuse()
    else:
        vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    if request.param != "plain":
        special = [(token, library.token_to_id(token)) for token in ("<s>", "</s>")]
        library.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> <s> $B </s>", special)
    library.save(str(path / "tokenizer.json"))
    config = {"eos_token": "</s>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def pairs(directory):
    return TextPairs(Tokenizer(directory))


@pytest.fixture(scope="module")
def oracle(directory):
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pairs_are_those_of_transformers(pairs, oracle, pair):
    assert pairs.encode(*pair, None, None, PromptLimit(100, "documents[0]")) == oracle(*pair)["input_ids"]


@pytest.mark.parametrize("keeps_first", [True, False])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_longer_text_is_cut_first_as_in_transformers(pairs, oracle, pair, keeps_first):
    oracle.truncation_side = "right" if keeps_first else "left"
    for most in range(5, 20):
        cut = pairs.encode(*pair, None, Truncation(most, keeps_first), PromptLimit(100, "documents[0]"))
        assert cut == oracle(*pair, truncation=True, max_length=most)["input_ids"]


def test_special_tokens_in_the_texts_are_text(pairs, oracle):
    ids = pairs.encode("<s>", "a</s>", None, None, PromptLimit(100, "documents[0]"))
    special = {oracle.convert_tokens_to_ids(token) for token in ("<s>", "</s>")}
    added = [each for each in oracle("x", "y")["input_ids"] if each in special]
    assert [each for each in ids if each in special] == added
    assert len(ids) == len(added) + len("<s>a</s>")


def test_a_long_pair_is_refused_by_its_field(pairs):
    with pytest.raises(ServiceError, match=r"documents\[3\]: must be 1 to 10 tokens") as refusal:
        pairs.encode("a b c", "d e f g h", None, None, PromptLimit(10, "documents[3]"))
    assert refusal.value.field == "documents[3]"


def test_text_is_shortened_by_its_tokens(directory):
    tokenizer = Tokenizer(directory)
    assert tokenizer.shortened("abcdef", 2, keeps_first=True) == "abcd"
    assert tokenizer.shortened("abcdef", 2, keeps_first=False) == "cdef"
    assert tokenizer.shortened("abcdef", 6, keeps_first=True) == tokenizer.shortened("", 1, keeps_first=False) == ""
