"""Prompts that are too long are refused before all of them is tokenized, and no other prompt is."""

import json
import re

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.errors import Reason, ServiceError
from penstock.service.text.prompt_limit import PromptLimit
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.truncation import Truncation

MIB = 1 << 20
TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture
def load(tmp_path):
    """A tokenizer with tokens of 1, 2, 4, 8 and 16 letters a, which may do without what tells how long tokens are."""

    def load(*, known: bool, rstrip: bool = False) -> Tokenizer:
        runs = ["a" * 2**power for power in range(1, 5)]
        vocab = {token: number for number, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *runs])}
        library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(run[::2], run[::2]) for run in runs]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        if not known:
            library.normalizer = normalizers.NFC()
        library.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True, rstrip=rstrip)])
        library.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        tokenizer = Tokenizer(tmp_path)
        assert (tokenizer.longest_token_bytes is not None) is known
        return tokenizer

    return load


@pytest.fixture
def encoded(monkeypatch):
    """How many characters each call of the library was given."""
    lengths = []

    def watch(tokenizer):
        encoding = tokenizer._special_token_guard._encoding

        def counted(text, add_special_tokens):
            lengths.append(len(text))
            return encoding(text, add_special_tokens)

        monkeypatch.setattr(tokenizer._special_token_guard, "_encoding", counted)
        return lengths

    return watch


def encode(tokenizer, kind, text, limit):
    chat = TemplateInput([TemplateMessage("user", text)])
    return {
        "text": lambda: tokenizer.encode(text, limit=limit),
        "chat": lambda: tokenizer.encode_chat(chat, limit),
        "text after": lambda: tokenizer.encode_after(text, limit),
    }[kind]()


KINDS = ["text", "chat", "text after"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_with_far_too_many_tokens_is_tokenized_in_part(load, encoded, kind):
    tokenizer = load(known=False)
    lengths = encoded(tokenizer)
    with pytest.raises(ServiceError, match="prompt: must be 1 to 1,000 tokens; it has more") as error:
        encode(tokenizer, kind, "7 " * (2 * MIB - 16), PromptLimit(1000, "prompt"))
    assert error.value.reason is Reason.CONTEXT_LENGTH
    assert sum(lengths) < 100_000


@pytest.mark.parametrize(
    ("field", "encode"),
    [
        ("text", lambda tokenizer, text: tokenizer.encode(text)),
        ("chat", lambda tokenizer, text: tokenizer.encode_chat(TemplateInput([TemplateMessage("user", text)]))),
        (
            "inputs[0].text",
            lambda tokenizer, text: tokenizer.encode(
                text, truncation=Truncation(8, keeps_first=True), limit=PromptLimit(1000, "inputs[0].text")
            ),
        ),
    ],
    ids=["text", "chat", "truncated"],
)
def test_a_text_that_is_not_a_prompt_has_a_limit_too(load, encoded, field, encode):
    """Each token takes hundreds of bytes while the library works, so no call of it gets millions."""
    tokenizer = load(known=False)
    lengths = encoded(tokenizer)
    with pytest.raises(ServiceError, match=re.escape(f"{field}: at most 786,432 tokens at once; it has more")) as error:
        encode(tokenizer, "7 " * (2 * MIB - 16))
    assert error.value.reason is Reason.TOO_EXPENSIVE
    assert 786_432 < sum(lengths) < MIB
    assert max(lengths) < 20_000


def test_a_chat_with_too_many_tokens_whatever_they_are_is_not_tokenized(load, encoded):
    tokenizer = load(known=True)
    lengths = encoded(tokenizer)
    with pytest.raises(ServiceError, match=r"it has 262,14\d at least"):
        encode(tokenizer, "chat", "a" * (4 * MIB - 64), PromptLimit(100_000, "chat"))
    assert not lengths


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_of_long_tokens_is_taken(load, encoded, kind, known):
    """It has twice the characters of a text whose tokens are estimated."""
    tokenizer = load(known=known)
    text = "a" * 320_000
    wanted = encode(tokenizer, kind, text, None)
    assert 20_000 <= len(wanted) <= 20_001
    lengths = encoded(tokenizer)
    assert encode(tokenizer, kind, text, PromptLimit(len(wanted), "prompt")) == wanted
    assert len(lengths) > 1
    with pytest.raises(ServiceError, match=f"it has {len(wanted):,}"):
        encode(tokenizer, kind, text, PromptLimit(len(wanted) - 1, "prompt"))


def test_spaces_that_a_token_takes_are_not_estimated(load, encoded):
    tokenizer = load(known=False, rstrip=True)
    chat = TemplateInput([TemplateMessage("user", "a"), TemplateMessage("user", " " * 300_000 + "a")])
    assert len(tokenizer.encode_chat(chat, PromptLimit(10, "chat"))) == 4


def test_with_a_context_both_are_counted():
    limit = PromptLimit(100, "text", num_context_tokens=90)
    limit.check(10)
    limit.check(0)
    with pytest.raises(ServiceError, match="at most 100 tokens together with the context; they are 101, 90 of them"):
        limit.check(11)
