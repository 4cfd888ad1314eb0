"""A tiktoken.model of Moonshot AI gives the ids and texts of tiktoken, and a broken one is refused in one line."""

import json
from base64 import b64decode, b64encode

import pytest
import tiktoken
from texts.diverse_texts import diverse_texts

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.text.conversion.convert import TIKTOKEN
from penstock.service.text.tokenizer_config import TokenizerError

from .conftest import streamed
from .test_tekken import mistrals

NUM_TOKENS, NUM_SPECIAL = 2000, 256
PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As published in tokenization_kimi.py."""
ADDED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|tool_call_begin|>", 255: "[PAD]"}
"""The first id has the offset 0."""
NOT_SPECIAL = "<|tool_call_begin|>"
MIXED = "你好Hello世界 don'T 漢字かな交じり文 IT'S 2024年1234 éÀ\n\n  x ｱｲｳ한국어"


def write(path, change_lines=lambda lines: None, change_config=lambda config: None, num_tokens=NUM_TOKENS):
    """Writes a tiktoken.model with the first tokens of Mistral's, and the file beside it; returns tiktoken's own."""
    tokens = [b64decode(token["token_bytes"]) for token in mistrals()["vocab"][:num_tokens]]
    lines = [b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    change_lines(lines)
    (path / TIKTOKEN).write_bytes(b"".join(line + b"\n" for line in lines))
    added = {num_tokens + offset: name for offset, name in ADDED.items()}
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": {
            str(token_id): {"content": name, "special": name != NOT_SPECIAL} for token_id, name in added.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
    }
    change_config(config)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    special = {
        added.get(token_id, f"<|reserved_token_{token_id}|>"): token_id
        for token_id in range(num_tokens, num_tokens + NUM_SPECIAL)
    }
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def test_ids_and_texts_are_those_of_tiktoken(tmp_path, serve):
    own, tokenizer = write(tmp_path), serve(tmp_path)
    for text in (MIXED, *diverse_texts(1000)):
        ids = own.encode(text, disallowed_special=())
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == streamed(tokenizer, ids) == own.decode(ids) == text


def test_special_tokens_have_their_ids(tmp_path, serve):
    own, tokenizer = write(tmp_path), serve(tmp_path)
    ids = range(NUM_TOKENS, NUM_TOKENS + NUM_SPECIAL)
    assert tokenizer.vocab_size == own.n_vocab
    assert tokenizer.special_ids == set(ids) - {own.encode_single_token(NOT_SPECIAL)}
    assert tokenizer.decode(ids, True) == own.decode(list(ids))
    assert tokenizer.eos_token_ids == (NUM_TOKENS + 1,)


def test_only_templates_make_control_tokens(tmp_path, serve):
    own = write(tmp_path)
    template = "{% for m in messages %}[BOS]{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    text = "say [BOS] <|im_end|>"
    ids = serve(tmp_path).encode_chat(TemplateInput([TemplateMessage("user", text)]))
    assert ids == [NUM_TOKENS, *own.encode(text, disallowed_special=()), NUM_TOKENS + 2]


def test_the_names_of_the_class_are_defaults(tmp_path, serve):
    write(tmp_path, change_config=lambda config: config.pop("eos_token"))
    assert serve(tmp_path).eos_token_ids == (NUM_TOKENS + 1,)


def line(number, content):
    return lambda lines: lines.__setitem__(number, content)


def set_class(name):
    return lambda config: config.update(tokenizer_class=name)


def add(token_id, content):
    return lambda config: config["added_tokens_decoder"].update({str(token_id): {"content": content, "special": True}})


BROKEN_LINES = {
    "has a line 4 that is not a token in base64 and its rank": line(3, b"!!! 3"),
    "has a line 5 that is not a token": line(4, b"QQ=="),
    "has a line 6 that is not a token": line(5, b""),
    "has a line 7 whose rank is not 6": line(6, b"Bg== 7"),
    "has a line 301 that is not a token": line(300, b"= 300"),
    "has a token twice, the second time in line 302": line(301, b"AA== 301"),
    "lacks 1 of the 256 bytes": line(1, b64encode(b"abcdefgh") + b" 1"),
    r"has the special token '\[BOS\]' among the others": line(300, b64encode(b"[BOS]") + b" 300"),
    "its tokens are too long together": line(300, b64encode(b"a" * 9000) + b" 300"),
}
BROKEN_CONFIGS = {
    "is read only with the tokenizer_class TikTokenTokenizer .* not .Other.": set_class("Other"),
    "is read only with the tokenizer_class TikTokenTokenizer .* not None": set_class(None),
    "has 400 tokens, and tokenizer_config.json adds one with the id 7": add(7, "<new>"),
    "has 400 tokens, and tokenizer_config.json adds one with the id 9,999,999": add(9_999_999, "<new>"),
    "has a special token in tokenizer_config.json twice": add(420, "<|reserved_token_421|>"),
}


@pytest.mark.parametrize("message", BROKEN_LINES)
def test_broken_files_are_refused(message, tmp_path, serve):
    write(tmp_path, change_lines=BROKEN_LINES[message], num_tokens=400)
    with pytest.raises(TokenizerError, match=rf"^{tmp_path / TIKTOKEN}: .*{message}.*fetch it again") as caught:
        serve(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("message", BROKEN_CONFIGS)
def test_configurations_that_do_not_fit_are_refused(message, tmp_path, serve):
    write(tmp_path, change_config=BROKEN_CONFIGS[message], num_tokens=400)
    with pytest.raises(TokenizerError, match=rf"^{tmp_path / TIKTOKEN}: {message}"):
        serve(tmp_path)
