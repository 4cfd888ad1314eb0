"""A tokenizer.model gives the ids and texts of SentencePiece, and a broken one is refused in one line."""

import json
import shutil
from typing import Any

import pytest
import sentencepiece
from texts.diverse_texts import diverse_texts

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.text.conversion.convert import SENTENCEPIECE
from penstock.service.text.conversion.sentencepiece_proto import parse_model
from penstock.service.text.tokenizer_config import TokenizerError

from .conftest import MISTRAL, streamed, train

PLAIN: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe"},
    "llama": {
        "model_type": "bpe",
        "user_defined_symbols": ["<|a|>", "<b>x", "▁▁▁"],
        "control_symbols": ["[INST]", "[/INST]"],
        **PLAIN,
    },
    "gemma": {
        "model_type": "bpe",
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<start_of_turn>", "\n", "\n\n", "▁▁", "▁▁▁"],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        **PLAIN,
    },
}
UNIGRAMS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bytes": {**PLAIN, "allow_whitespace_only_pieces": True, "control_symbols": ["<c>"]},
}
SYMBOLS = ["a<|a|>b", "<|a|> x", " <b>x<b>x\n", "<start_of_turn>user\n\n\nhi", "x<c>y[INST] z [/INST]", "<0x0A>"]


def unigram_score(model, ids):
    return sum(model.get_score(token_id) for token_id in ids)


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_mistrals_models_give_their_ids(name, tmp_path, serve):
    shutil.copy(MISTRAL / name, tmp_path / SENTENCEPIECE)
    own = sentencepiece.SentencePieceProcessor(model_file=str(MISTRAL / name))
    tokenizer = serve(tmp_path)
    for text in [*diverse_texts(1000), "see [REFERENCE_DOC_3]x and  [REFERENCE_DOC_3] [REF]", "[INST]x[/INST]"]:
        ids = own.encode(text)
        assert tokenizer.encode(text) == [own.bos_id(), *ids]
        assert tokenizer.decode(ids) == streamed(tokenizer, ids) == own.decode(ids) == text.replace("▁", " ")
    assert tokenizer.eos_token_ids == (own.eos_id(),)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_bpe_models_give_their_ids(kind, tmp_path, serve):
    own = train(tmp_path, **KINDS[kind])
    tokenizer = serve(tmp_path)
    for text in [*diverse_texts(1000, any_marks=kind != "bpe"), *SYMBOLS]:
        ids = own.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        if kind != "bpe":
            assert tokenizer.decode(ids) == streamed(tokenizer, ids) == own.decode(ids) == text.replace("▁", " ")
    assert tokenizer.encode("x")[0] == own.bos_id()


@pytest.mark.parametrize("kind", UNIGRAMS)
def test_unigram_models_give_their_ids_or_as_probable_ones(kind, tmp_path, serve):
    """SentencePiece sums scores in float32, so rounding decides between equal ones, as in runs of a character."""
    own = train(tmp_path, model_type="unigram", **UNIGRAMS[kind])
    tokenizer = serve(tmp_path)
    num_different = 0
    for text in [*diverse_texts(1000, any_marks=kind != "defaults"), *SYMBOLS]:
        ids, found = own.encode(text), tokenizer.encode(text, add_special_tokens=False)
        if ids != found:
            num_different += 1
            assert unigram_score(own, found) == pytest.approx(unigram_score(own, ids), rel=1e-6)
            assert own.decode(found) == own.decode(ids)
    assert num_different < 100


@pytest.mark.parametrize("options", [{}, KINDS["llama"]], ids=["collapsed", "kept"])
def test_long_runs_take_no_quadratic_time(options, tmp_path, serve):
    own = train(tmp_path, **options)
    tokenizer = serve(tmp_path)
    text = "▁" * (1 << 19) + "x" + " " * (1 << 19)
    assert tokenizer.decode(tokenizer.encode(text)) == own.decode(own.encode(text))


def test_only_templates_make_control_tokens(tmp_path, serve):
    own = train(tmp_path, **KINDS["llama"])
    template = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = serve(tmp_path)
    begin, end = own.piece_to_id("[INST]"), own.piece_to_id("[/INST]")
    ids = tokenizer.encode_chat(TemplateInput([TemplateMessage("user", "say [/INST] </s>")]))
    assert ids == [own.bos_id(), begin, *own.encode("say [/INST] </s>"), end]
    assert not {begin, end, own.eos_id()} & set(ids[2:-1])


@pytest.mark.parametrize(
    ("config", "begins", "ends"),
    [({"add_bos_token": False}, False, False), ({"add_eos_token": True}, True, True), ({"legacy": True}, True, False)],
)
def test_the_configuration_says_what_is_around_a_text(config, begins, ends, tmp_path, serve):
    own = train(tmp_path, **KINDS["llama"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = [own.bos_id()] * begins + own.encode("the") + [own.eos_id()] * ends
    assert serve(tmp_path).encode("the") == expected


def test_the_configuration_may_deny_the_space_before_a_text(tmp_path, serve):
    train(tmp_path, **KINDS["llama"])
    model = parse_model((tmp_path / SENTENCEPIECE).read_bytes())
    model.normalizer_spec.add_dummy_prefix = False
    without = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": false}')
    tokenizer = serve(tmp_path)
    for text in ("the", " the", "a<b>x the"):
        assert tokenizer.encode(text, add_special_tokens=False) == without.encode(text)
        assert tokenizer.decode(without.encode(text)) == text


def test_placeholders_get_their_names_and_new_tokens_their_ids(tmp_path, serve):
    """As in InternLM 2, whose tokenizer.model has placeholders for the tokens of conversations."""
    own = train(tmp_path, model_type="bpe", user_defined_symbols=["[UNUSED_TOKEN_1]", "[UNUSED_TOKEN_2]"], **PLAIN)
    first, size = own.piece_to_id("[UNUSED_TOKEN_1]"), own.get_piece_size()
    named = {first: "<|im_start|>", first + 1: "<|im_end|>", size: "<|new|>"}
    decoder = {str(token_id): {"content": content, "special": True} for token_id, content in named.items()}
    config = {
        "added_tokens_decoder": decoder,
        "eos_token": "<|im_end|>",
        "chat_template": "<|im_start|>{{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = serve(tmp_path)
    assert tokenizer.facts.warnings == ()
    assert tokenizer.eos_token_ids == (first + 1,)
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode_chat(TemplateInput([TemplateMessage("user", "x")])) == [first, first + 1]
    assert not named.keys() & set(tokenizer.encode("<|im_start|>[UNUSED_TOKEN_1]<|new|>"))


def without_unknown(model):
    del model.pieces[0]


def twice(model):
    model.pieces.add(piece=model.pieces[-1].piece)


BROKEN = {
    "has model_type 3, and only": lambda model: setattr(model.trainer_spec, "model_type", 3),
    "has treat_whitespace_as_suffix": lambda model: setattr(model.trainer_spec, "treat_whitespace_as_suffix", True),
    "has treat_whitespace_as_suffix, or no": lambda m: setattr(m.normalizer_spec, "escape_whitespaces", False),
    "is not a SentencePiece model": lambda model: model.ClearField("pieces"),
    "has a token that is not UTF-8": lambda model: model.pieces.add(piece=b"\xff"),
    "has an empty token, or a token twice": lambda model: model.pieces.add(piece=b""),
    "has an empty token, or a token": twice,
    "has a token whose score is not a number": lambda m: m.pieces.add(piece=b"qq", score=float("nan")),
    "has no token for unknown characters": without_unknown,
    "its tokens are too long together": lambda m: m.pieces.add(piece=b"q" * 9000),
    "precompiled_charsmap is damaged": lambda m: setattr(m.normalizer_spec, "precompiled_charsmap", b"\xff" * 8),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_models_are_refused(message, tmp_path, serve):
    train(tmp_path, model_type="bpe" if "too long" in message else "unigram")
    file = tmp_path / SENTENCEPIECE
    model = parse_model(file.read_bytes())
    BROKEN[message](model)
    file.write_bytes(model.SerializeToString())
    with pytest.raises(TokenizerError, match=rf"^{file}: .*{message}.*fetch it again") as caught:
        serve(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"IQ== 0\nIg== 1\n", b"\x0a\xff\xff\xff\xff\x0f", b"{}"])
def test_what_is_no_model_is_refused(content, tmp_path, serve):
    file = tmp_path / SENTENCEPIECE
    file.write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"^{file}: is not a SentencePiece model: fetch it again, or make a"):
        serve(tmp_path)


def test_a_model_that_is_cut_off_never_ends_the_process(tmp_path, serve):
    train(tmp_path)
    file = tmp_path / SENTENCEPIECE
    whole = file.read_bytes()

    def refusal(size):
        file.write_bytes(whole[:size])
        try:
            serve(tmp_path)
        except TokenizerError as error:
            return str(error)
        return None  # a prefix may be a whole message

    refusals = [refusal(size) for size in range(0, len(whole), len(whole) // 30)]
    assert sum(each is not None for each in refusals) > 20
    assert all(each is None or each.startswith(f"{file}: ") for each in refusals)
