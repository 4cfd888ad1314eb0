"""Tokens that stand only beside tokenizer.json have the ids, flags and names that transformers gives them."""

import json
import re
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher
from tokenizers import AddedToken

from penstock.models.structured_output.compiler import read_tokenizer, to_grammar
from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.tokenizer_config import TokenizerError
from penstock.service.text.tokenizer_files import predict_facts

START, END, PLAIN = "<|start|>", "<|stop|>", "(plain)"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}(plain) <|image|>{{ m.content }} <|stop|> {% endfor %}"
    "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ video_token }}"
)


def described(content, typed=False, **flags):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}
    return {**({"__type": "AddedToken"} if typed else {}), "content": content, **flags}


DECODER = {"258": described(START, rstrip=True), "259": described(END, lstrip=True)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "added_tokens_decoder": {"tokenizer_config": {"added_tokens_decoder": DECODER, "eos_token": END}},
    "ids in another order": {
        "tokenizer_config": {
            "eos_token": END,
            "added_tokens_decoder": {
                "300": described(START), "259": described(PLAIN, special=False), "20": described(END),
            },
        }
    },
    "named": {"tokenizer_config": {"eos_token": END, "bos_token": described(START, typed=True, lstrip=True)}},
    "a list": {"tokenizer_config": {"extra_special_tokens": [START, described(PLAIN, typed=True)], "eos_token": END}},
    "a list of its old name": {"tokenizer_config": {"additional_special_tokens": [START], "eos_token": END}},
    "names of its own": {
        "tokenizer_config": {
            "extra_special_tokens": {"image_token": "<|image|>", "video_token": "<|video|>"},
            "additional_special_tokens": [START],
            "eos_token": END,
        }
    },
    "names without a list": {"tokenizer_config": {"image_token": "<|image|>", "eos_token": END}},
    "added_tokens.json": {"tokenizer_config": {"eos_token": END}, "added_tokens": {PLAIN: 258, START: 260, END: 259}},
    "special_tokens_map.json": {
        "special_tokens_map": {
            "eos_token": described(END, lstrip=True), "bos_token": START, "additional_special_tokens": ["<|image|>"]
        }
    },
    "a map that wins": {
        "tokenizer_config": {"eos_token": PLAIN, "extra_special_tokens": [START]},
        "special_tokens_map": {"eos_token": END, "extra_special_tokens": ["<|image|>"]},
    },
    "a map that is ignored": {
        "tokenizer_config": {"added_tokens_decoder": DECODER, "eos_token": END},
        "special_tokens_map": {"eos_token": PLAIN},
        "added_tokens": {PLAIN: 260},
    },
    "flags of a token that is there": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "256": described("<|end|>", rstrip=True), "257": described("<|turn|>", special=False),
            },
            "eos_token": "<|end|>",
        }
    },
}  # fmt: skip


@pytest.fixture
def write(tmp_path, byte_tokenizer_path):
    """Writes files beside a byte tokenizer's tokenizer.json, which has <|end|>, 256, and <|turn|>, 257."""

    def write(template=TEMPLATE, library=None, **files):
        library = library or tokenizers.Tokenizer.from_file(str(byte_tokenizer_path / "tokenizer.json"))
        library.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.pop("tokenizer_config", {})}
        for name, content in {"tokenizer_config": config, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return write


@pytest.fixture(scope="module")
def load_oracle():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_transformers(write, load_oracle, layout):
    path = write(**LAYOUTS[layout])
    served, oracle = Tokenizer(path), load_oracle(path)
    # A caller may write only tokens that are not special.
    word = "there" if PLAIN in served.special_tokens else PLAIN
    chat = [{"role": "user", "content": f"hi {word} there"}, {"role": "assistant", "content": "good"}]
    text = oracle.apply_chat_template(chat, tokenize=False)
    messages = [TemplateMessage(turn["role"], turn["content"]) for turn in chat]
    assert served.render_chat(TemplateInput(messages)) == text
    assert served.encode_chat(TemplateInput(messages)) == oracle.encode(text, add_special_tokens=False)
    assert oracle.eos_token_id in served.eos_token_ids
    assert served.vocab_size == len(oracle)
    special = {token_id for token_id, token in oracle.added_tokens_decoder.items() if token.special}
    assert special <= served.special_ids
    ids = served.encode_chat(TemplateInput(messages))
    assert served.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert served.decode(ids, include_special_tokens=True) == oracle.decode(ids)
    assert predict_facts(path) == served.facts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_caller_cannot_write_them(write, layout):
    served = Tokenizer(write("{% for m in messages %}{{ m.content }}{% endfor %}", **LAYOUTS[layout]))
    text = f"a{START}{END} <|image|> <|end|>"
    for ids in (served.encode(text), served.encode_chat(TemplateInput([TemplateMessage("user", text)]))):
        assert not served.special_ids & set(ids)
        assert served.decode(ids) == text


@pytest.mark.parametrize("layout", ["added_tokens_decoder", "added_tokens.json", "names of its own"])
def test_grammars_know_them(write, layout):
    served = Tokenizer(write(**LAYOUTS[layout]))
    facts = served.facts
    arguments = (facts.special_tokens, facts.num_ids, facts.eos_token_ids, facts.added_tokens)
    known = read_tokenizer(str(served.directory), *arguments)
    assert known.vocab_size == served.vocab_size
    assert all(map(known.is_special_token, served.special_ids))
    matcher = LLMatcher(known, to_grammar("regex", f"a{re.escape(PLAIN)}b", served.marker_ids))
    plain = {content: token_id for token_id, content in facts.added_tokens}.get(PLAIN)
    for token_id in [ord("a"), *([plain] if plain else PLAIN.encode()), ord("b"), facts.eos_token_ids[0]]:
        assert matcher.consume_token(token_id)
    assert matcher.is_stopped()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer_config": {}}, r"no token ends an output.*name eos_token"),
        ({"tokenizer_config": {"eos_token": END}, "generation_config": {"eos_token_id": [256, 999]}},
         r"generation_config\.json: eos token 999 is ignored: the model has 259 tokens"),
        ({"tokenizer_config": {"eos_token": END}, "config": {"eos_token_id": "2"}}, r"config\.json: eos token 2 is i"),
        ({"tokenizer_config": {"added_tokens_decoder": {"300": described(END)}, "eos_token": END}},
         r"tokenizer_config\.json: token '<\|stop\|>' does not get the id 300"),
        ({"tokenizer_config": {"eos_token": END}, "added_tokens": {START: 900, PLAIN: 901, END: 258}},
         r"added_tokens\.json: token '<\|start\|>' does not get the id 900.*\(and 1 more\)"),
        ({"tokenizer_config": {
            "eos_token": END, "extra_special_tokens": [START], "additional_special_tokens": [PLAIN]
         }},
         r"'\(plain\)' of additional_special_tokens is ignored.*extra_special_tokens"),
        (LAYOUTS["a map that is ignored"],
         r"tokenizer_config\.json: '\(plain\)' of special_tokens_map\.json is ignored.*added_tokens_decoder"),
        ({"tokenizer_config": {"added_tokens_decoder": {}, "eos_token": "<|end|>"}, "added_tokens": {START: 1, END: 2}},
         r"'<\|start\|>' of added_tokens\.json is ignored.*\(and 1 more\)"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_reported(write, files, says):
    path = write(**files)
    facts = predict_facts(path)
    assert facts == Tokenizer(path).facts
    [warning] = facts.warnings
    assert re.search(says, warning)


@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if name not in ("ids in another order", "a map that is ignored")]
)
def test_what_has_its_effect_is_not_reported(write, layout):
    assert Tokenizer(write(**LAYOUTS[layout])).facts.warnings == ()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config", {"added_tokens_decoder": [END]}, "added_tokens_decoder must be an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": END}}, "added_tokens_decoder must be an object"),
        ("tokenizer_config", {"added_tokens_decoder": {"258": {}}}, r"added_tokens_decoder\.258 must be a token"),
        ("tokenizer_config", {"eos_token": 5}, "eos_token must be a token"),
        ("tokenizer_config", {"eos_token": {"content": "x", "lstrip": 1}}, "eos_token must have flags"),
        ("tokenizer_config", {"extra_special_tokens": "x"}, "extra_special_tokens must be a list"),
        ("tokenizer_config", {"extra_special_tokens": {"image_token": 3}}, "image_token must be a token"),
        ("tokenizer_config", {"extra_special_tokens": 5}, "extra_special_tokens must be a list"),
        ("special_tokens_map", {"eos_token": {"content": 5}}, "eos_token must be a token"),
        ("special_tokens_map", {"pad_token": True}, "pad_token must be a token"),
        ("added_tokens", {END: "258"}, "the id of '<|stop|>' is 258"),
        ("added_tokens", [END], "is not a JSON object"),
    ],
)
def test_a_broken_file_is_named(write, name, content, says):
    path = write(**{name: content})
    for read in (predict_facts, Tokenizer):
        with pytest.raises(TokenizerError, match=says.replace("|", r"\|")) as caught:
            read(path)
        assert str(path / f"{name}.json") in str(caught.value)


SINGLE_WORDS = [
    "{{ '<w>' }}", "a<w>", "<w>b", "a <w> b", "_<w>", "é<w>", "<w>5", ".<w>.", "<w><w>", "a<w><w>", "<s><w>", "<w><s>b",
    "WORD", "WORDS", " WORD ", "WORD<w>", "<w>WORD", "WORD WORD", "<s>WORD<s>", "x\n<w>\tx", "Ⓐ<w>", "²<w>", "漢<w>",
]  # fmt: skip


@pytest.mark.parametrize("strips", [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
@pytest.mark.parametrize("is_named", [False, True])
def test_single_words_and_spaces_are_those_of_transformers(write, load_oracle, strips, is_named):
    """``single_word``: no token where a letter stands beside it."""
    library = tokenizers.Tokenizer.from_file(str(write() / "tokenizer.json"))
    flags = {"special": True, "normalized": False, **strips}
    words = [AddedToken(word, single_word=True, **flags) for word in ("<w>", "WORD")]
    library.add_tokens([*words, AddedToken("<s>", **flags)])
    names = {"eos_token": "<w>", "bos_token": "<s>", "unk_token": "WORD"} if is_named else {"eos_token": "<|end|>"}
    for template in SINGLE_WORDS:
        path = write(template + "{{ messages[0].content }}", library, tokenizer_config=names)
        served, oracle = Tokenizer(path), load_oracle(path)
        for content in ("", "x", " x"):
            text = oracle.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            expected = oracle.encode(text, add_special_tokens=False)
            assert served.encode_chat(TemplateInput([TemplateMessage("user", content)])) == expected, text


def test_a_caller_cannot_write_a_single_word(write):
    library = tokenizers.Tokenizer.from_file(str(write() / "tokenizer.json"))
    library.add_tokens([AddedToken("<w>", single_word=True, special=True, normalized=False)])
    served = Tokenizer(write("a {{ messages[0].content }} b", library, tokenizer_config={"eos_token": "<|end|>"}))
    for content in ("<w>", "x<w>y", " <w> "):
        assert not served.special_ids & set(served.encode_chat(TemplateInput([TemplateMessage("user", content)])))
