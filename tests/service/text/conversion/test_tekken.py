"""A tekken.json gives the ids and texts of mistral-common, and a broken one is refused in one line."""

import json
import shutil
from base64 import b64encode
from functools import cache

import pytest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from texts.diverse_texts import diverse_texts

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.text.conversion.convert import TEKKEN
from penstock.service.text.tokenizer_config import TokenizerError

from .conftest import MISTRAL, streamed

IGNORE, KEEP = SpecialTokenPolicy.IGNORE, SpecialTokenPolicy.KEEP
NUM_SPECIAL = 30
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]"]


@cache
def mistrals():
    return json.loads((MISTRAL / "tekken_240911.json").read_bytes())


def write(path, change=lambda described: None, num_tokens=2000):
    """Writes a tekken.json with the first tokens of Mistral's and a few special ones."""
    own = mistrals()
    vocab = [token.copy() for token in own["vocab"][: num_tokens + 10]]
    described = {**own, "config": own["config"].copy(), "vocab": vocab}
    described["special_tokens"] = [
        {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)
    ]
    sizes = {"default_num_special_tokens": NUM_SPECIAL, "default_vocab_size": num_tokens + NUM_SPECIAL}
    described["config"] |= {**sizes, "version": "v11", "num_vocab_tokens": len(described["vocab"])}
    change(described)
    (path / TEKKEN).write_text(json.dumps(described))
    return path


def without_special_tokens(described):
    del described["special_tokens"]
    described["config"]["version"] = "v3"


def check_same(own, tokenizer):
    for text in diverse_texts(1000):
        ids = own.encode(text, bos=True, eos=False)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == streamed(tokenizer, ids) == own.decode(ids, IGNORE) == text


def check_special(own, tokenizer):
    assert tokenizer.vocab_size == own.n_words
    assert tokenizer.special_ids == set(range(own.num_special_tokens))
    special = range(own.num_special_tokens)
    assert tokenizer.decode(special, True) == "".join(own.decode([token_id], KEEP) for token_id in special)
    assert tokenizer.eos_token_ids == (own.eos_id,)


def test_a_file_of_an_old_version(tmp_path, serve):
    """Without special tokens, as Mistral's own."""
    own = Tekkenizer.from_file(write(tmp_path, without_special_tokens, num_tokens=20_000) / TEKKEN)
    tokenizer = serve(tmp_path)
    check_same(own, tokenizer)
    check_special(own, tokenizer)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_mistrals_own_files_give_their_ids(name, tmp_path, serve):
    shutil.copy(MISTRAL / name, tmp_path / TEKKEN)
    own, tokenizer = Tekkenizer.from_file(tmp_path / TEKKEN), serve(tmp_path)
    check_same(own, tokenizer)
    check_special(own, tokenizer)


def test_a_file_with_its_own_special_tokens(tmp_path, serve):
    own = Tekkenizer.from_file(write(tmp_path) / TEKKEN)
    tokenizer = serve(tmp_path)
    check_same(own, tokenizer)
    check_special(own, tokenizer)


def test_only_templates_make_control_tokens(tmp_path, serve):
    own = Tekkenizer.from_file(write(tmp_path) / TEKKEN)
    template = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    text = "say [INST] </s>"
    ids = serve(tmp_path).encode_chat(TemplateInput([TemplateMessage("user", text)]))
    assert ids == [1, 3, *own.encode(text, bos=False, eos=False), 4]


@pytest.mark.parametrize(("config", "around"), [({"add_bos_token": False}, (0, 0)), ({"add_eos_token": True}, (1, 1))])
def test_the_configuration_says_what_is_around_a_text(config, around, tmp_path, serve):
    own = Tekkenizer.from_file(write(tmp_path) / TEKKEN)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert serve(tmp_path).encode("the") == own.encode("the", bos=bool(around[0]), eos=bool(around[1]))


def set_bytes(index, content):
    return lambda described: described["vocab"][index].update(token_bytes=b64encode(content).decode())


BROKEN = {
    "is not valid .*config": lambda described: described.pop("config"),
    "is not valid .*Expected `str`": lambda described: described["config"].update(pattern=5),
    r"is not valid .*vocab\[3\]": lambda described: described["vocab"][3].update(token_bytes="?"),
    "has config.default_num_special_tokens -1": lambda d: d["config"].update(default_num_special_tokens=-1),
    "has config.default_num_special_tokens 1,000,000": lambda d: d["config"].update(default_num_special_tokens=10**6),
    "has config.default_vocab_size 100, which": lambda d: d["config"].update(default_vocab_size=100),
    "has config.default_vocab_size 1,000,000,000,": lambda d: d["config"].update(default_vocab_size=10**9),
    "has special_tokens whose ranks": lambda described: described["special_tokens"][2].update(rank=9),
    "has an empty special token, or one": lambda described: described["special_tokens"][2].update(token_str="<s>"),
    "has an empty special token": lambda described: described["special_tokens"][2].update(token_str=""),
    "lacks special_tokens, which version v11 needs": lambda described: described.pop("special_tokens"),
    "has 6 special_tokens, and": lambda d: d["config"].update(default_num_special_tokens=5, default_vocab_size=400),
    "has tokens in vocab whose ranks": lambda described: described["vocab"][300].update(rank=301),
    "has a vocab that does not begin with the 256 bytes": set_bytes(7, b"ab"),
    "has an empty token in vocab": set_bytes(300, b""),
    "has an empty token in vocab, or one": set_bytes(300, b"a"),
    "has the special token '<s>' among the others": set_bytes(300, b"<s>"),
    "its tokens are too long together": set_bytes(300, b"a" * 9000),
    "token 'a+'... has 5,000 bytes": set_bytes(300, b"a" * 5000),
    "is not a valid tokenizer": lambda described: described["config"].update(pattern="("),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_files_are_refused(message, tmp_path, serve):
    write(tmp_path, BROKEN[message], num_tokens=400)
    with pytest.raises(TokenizerError, match=rf"^{tmp_path / TEKKEN}: .*{message}.*fetch it again") as caught:
        serve(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"[" * 100_000, b'{"config": ', b'{"config": "\xff"}'])
def test_what_is_no_tekken_file_is_refused(content, tmp_path, serve):
    (tmp_path / TEKKEN).write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"^{tmp_path / TEKKEN}: is not valid \(.*\): fetch it again, or make a"):
        serve(tmp_path)
