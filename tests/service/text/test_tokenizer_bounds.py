"""What a tokenizer's files may ask for: ids, tokens and texts that would take all memory are named instead."""

import base64
import json

import pytest

from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.tokenizer_bounds import MAX_ADDED_TOKENS, MAX_TOKEN_BYTES, MAX_TOKEN_IDS
from penstock.service.text.tokenizer_config import TokenizerError
from penstock.service.text.tokenizer_files import predict_facts


@pytest.fixture
def refused(byte_tokenizer_path, tmp_path):
    """What is said of a tokenizer.json that ``change`` has changed, or of a model with ``files`` beside it."""

    def refused(change=None, **files):
        described = json.loads((byte_tokenizer_path / "tokenizer.json").read_bytes())
        if change is not None:
            change(described)
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        problems = []
        for read in (predict_facts, Tokenizer):
            with pytest.raises(TokenizerError) as error:
                read(tmp_path)
            problems.append(str(error.value))
        assert len({*problems}) == 1
        assert "\n" not in problems[0]
        assert len(problems[0]) < 500
        return problems[0]

    return refused


def added(content, token_id=300):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


@pytest.mark.parametrize("token_id", [MAX_TOKEN_IDS, 10**9, 2**31, 2**32 - 1, 2**40, -1])
def test_an_id_of_the_vocabulary_has_a_bound(refused, token_id):
    problem = refused(lambda described: described["model"]["vocab"].update({"zz": token_id}))
    assert f"tokenizer.json: token 'zz' has the id {token_id:,}, and ids must be 0 to 4,194,303" in problem


@pytest.mark.parametrize("token_id", [MAX_TOKEN_IDS, 2**31])
def test_an_id_of_an_added_token_has_a_bound(refused, token_id):
    problem = refused(lambda described: described["added_tokens"].append(added("zz", token_id)))
    assert f"token 'zz' has the id {token_id:,}" in problem


@pytest.mark.parametrize("length", [MAX_TOKEN_BYTES + 1, 1_000_000])
def test_a_token_has_a_bound(refused, length):
    long = "x" * length
    for change in (
        lambda described: described["added_tokens"].append(added(long)),
        lambda described: described["model"]["vocab"].update({long: 299}),
    ):
        assert f"has {length:,} bytes, and may have 4,096" in refused(change)


def test_a_token_is_counted_in_bytes(refused):
    problem = refused(lambda described: described["added_tokens"].append(added("\u20ac" * 2000)))
    assert "has 6,000 bytes" in problem


def test_all_tokens_together_have_a_bound(refused):
    def change(described):
        described["model"]["vocab"].update({f"{number:04}{'x' * 4000}": 300 + number for number in range(40)})

    assert "its tokens are too long together" in refused(change)


def test_added_tokens_have_a_bound(refused):
    tokens = [{"id": number, "content": f"t{number}"} for number in range(MAX_ADDED_TOKENS + 1)]
    assert "has 262,145 added_tokens" in refused(lambda described: described.update(added_tokens=tokens))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"300": added("x" * 5000)}}),
        ("tokenizer_config", {"eos_token": "x" * 5000}),
        ("tokenizer_config", {"extra_special_tokens": ["x" * 5000]}),
        ("added_tokens", {"x" * 5000: 300}),
        ("special_tokens_map", {"pad_token": "x" * 5000}),
    ],
)
def test_a_token_of_another_file_has_the_same_bound(refused, name, content):
    assert "tokenizer_config.json: token 'xxxx" in refused(**{name: content})


@pytest.mark.parametrize("name", ["9" * 11, "9" * 5000, "\u0663", "-1", "x"])
def test_a_claimed_id_is_a_number(refused, name):
    content = {"added_tokens_decoder": {name: added("zz")}}
    assert "added_tokens_decoder must be an object of ids and tokens" in refused(tokenizer_config=content)


CHARSMAP = base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + b"a\0" + b"x" * 100_000 + b"\0").decode()


@pytest.mark.parametrize(
    "step",
    [
        {"type": "Replace", "pattern": {"String": " "}, "content": "x" * 65},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 64},
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 64},
        {"type": "Prepend", "prepend": "x" * 65},
        {"type": "Precompiled", "precompiled_charsmap": CHARSMAP},
    ],
)
def test_a_text_grows_only_so_far(refused, step):
    problem = refused(lambda described: described.update(normalizer=step))
    assert "tokenizer.json: normalizer makes texts more than 64 times as long" in problem


def test_growth_multiplies(refused):
    step = {"type": "Replace", "pattern": {"String": " "}, "content": "x" * 9}
    inner = {"type": "Sequence", "normalizers": [step]}
    outer = {"type": "Sequence", "normalizers": [step, inner]}
    assert "normalizer makes texts" in refused(lambda described: described.update(normalizer=outer))


def test_tokens_become_texts_of_a_bounded_length(refused):
    step = {"type": "Replace", "pattern": {"String": "x"}, "content": "y" * 1_000_000}
    decoder = {"type": "Sequence", "decoders": [step, {"type": "Fuse"}]}
    assert "decoder makes texts" in refused(lambda described: described.update(decoder=decoder))
