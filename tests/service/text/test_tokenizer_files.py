"""What a tokenizer is read from: where its template and its end tokens stand, and how broken files are named."""

import json
from pathlib import Path

import pytest
import tokenizers

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.errors import Reason, ServiceError
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.tokenizer_config import TokenizerError
from penstock.service.text.tokenizer_files import predict_facts


@pytest.fixture
def library(byte_tokenizer_path):
    """With the special tokens <|end|> and <|turn|>."""
    return tokenizers.Tokenizer.from_file(str(byte_tokenizer_path / "tokenizer.json"))


def write(directory, library, template=None, config=None, **files):
    library.save(str(directory / "tokenizer.json"))
    config = dict(config or {})
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_where_a_template_comes_from(tmp_path, library):
    def rendered(**options):
        return Tokenizer(tmp_path, **options).render_chat(TemplateInput([TemplateMessage("user", "x")]))

    listed = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
    write(tmp_path, library, listed)
    assert rendered() == "listed"
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert rendered() == "beside"
    given_file = tmp_path / "mine.jinja"
    given_file.write_text("mine")
    assert rendered(chat_template=given_file) == "mine"


def test_vocabulary_and_end_tokens(tmp_path, library):
    end, start = library.token_to_id("<|end|>"), library.token_to_id("<|turn|>")
    library.add_special_tokens(["<|stop|>"])
    config = {"eos_token": "<|stop|>"}
    write(tmp_path, library, config=config, generation_config={"eos_token_id": [end, 10**6]})
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": start}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == library.get_vocab_size()
    # config.json's counts only where generation_config.json has none, as in transformers.
    assert tokenizer.eos_token_ids == tuple(sorted((end, library.token_to_id("<|stop|>"))))
    for without in ("{}", '{"eos_token_id": null}', '{"eos_token_id": []}'):
        (tmp_path / "generation_config.json").write_text(without)
        assert Tokenizer(tmp_path).eos_token_ids == tuple(sorted((start, library.token_to_id("<|stop|>"))))


@pytest.mark.parametrize(
    ("added", "is_foreseen"),
    [({}, True), ({"id": 300}, False), ({"content": "a"}, False)],
    ids=["as made", "gap", "twice"],
)
def test_facts_are_foreseen_where_the_file_has_the_ids(tmp_path, library, added, is_foreseen):
    end, stop = library.token_to_id("<|end|>"), "<|stop|>"
    library.add_tokens([tokenizers.AddedToken("plain"), tokenizers.AddedToken(stop, special=True)])
    config = {"eos_token": stop, "extra_special_tokens": {"none": "<|none|>", "turn": "<|turn|>"}}
    write(tmp_path, library, config=config, generation_config={"eos_token_id": [end, 10**6]})
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text())
    described["added_tokens"][-2] |= added
    file.write_text(json.dumps(described))
    facts = Tokenizer(tmp_path).facts
    assert facts.special_tokens == ("<|none|>", "<|stop|>", "<|turn|>")
    assert [content for _, content in facts.added_tokens] == ["<|none|>"]
    assert predict_facts(tmp_path) == (facts if is_foreseen else None)


def test_an_end_token_that_is_not_marked_special_is_special_all_the_same(tmp_path, library):
    library.add_tokens([tokenizers.AddedToken("<|stop|>", special=False, normalized=False)])
    tokenizer = Tokenizer(write(tmp_path, library, config={"eos_token": "<|stop|>"}))
    stop = library.token_to_id("<|stop|>")
    assert stop in tokenizer.special_ids
    assert stop not in tokenizer.encode("a<|stop|>")
    assert tokenizer.decode([*tokenizer.encode("a"), stop]) == "a"


BROKEN = {
    "missing": ("tokenizer.json", None, "tokenizer.json: is missing"),
    "garbage": ("tokenizer.json", "{", "tokenizer.json: is not a valid tokenizer"),
    "other": ("tokenizer.json", "{}", "tokenizer.json: is not a valid tokenizer"),
    "config": ("tokenizer_config.json", "[]", "tokenizer_config.json: is not a JSON object"),
    "truncated": ("generation_config.json", '{"eos', "generation_config.json: is not valid JSON"),
    "template": (
        "chat_template.jinja",
        "{% if %}",
        "chat_template.jinja: the chat template is not valid Jinja, line 1",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_named(what, tmp_path, library):
    name, content, message = BROKEN[what]
    write(tmp_path, library, "{{ messages }}")
    path = tmp_path / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prefix_that_would_end_the_process_is_refused(tmp_path, library):
    write(tmp_path, library)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["continuing_subword_prefix"] = "x"
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="continuing_subword_prefix is not supported"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("listed", [[], [5], [None], [{"name": "default"}], [{"name": "other", "template": "x"}]])
def test_a_list_without_a_default_template_is_no_template(listed, tmp_path, library):
    assert not Tokenizer(write(tmp_path, library, listed)).has_chat_template


def test_a_template_file_that_is_not_there_is_named(tmp_path, library):
    write(tmp_path, library)
    with pytest.raises(TokenizerError, match=r"nowhere\.jinja: is missing"):
        Tokenizer(tmp_path, tmp_path / "nowhere.jinja")


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[" * 200_000, b'{"x": ' * 200_000, b'{"model": {"vocab": null}}', b'{"model": 5}']
)
def test_of_what_is_no_tokenizer_nothing_is_foreseen(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert predict_facts(tmp_path) is None
    with pytest.raises(TokenizerError, match="is not a valid tokenizer"):
        Tokenizer(tmp_path)


NAMED = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "{{ documents }}"}
TOOL = TemplateInput([TemplateMessage("user", "x")], tools=[{"type": "function"}])
QUESTION = TemplateInput([TemplateMessage("user", "x")])


def write_named(directory, library, in_files):
    if not in_files:
        return write(directory, library, [{"name": name, "template": text} for name, text in NAMED.items()])
    write(directory, library, "of the configuration")
    (directory / "chat_template.jinja").write_text(NAMED["default"])
    (directory / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (directory / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
    return directory


@pytest.mark.parametrize("in_files", [False, True])
def test_tools_have_the_template_that_is_called_so(in_files, tmp_path, library):
    tokenizer = Tokenizer(write_named(tmp_path, library, in_files))
    assert tokenizer.render_chat(QUESTION) == "plain"
    assert tokenizer.render_chat(TOOL) == "1 tools"
    assert [tokenizer.chat_template(with_tools=each).shows_tools for each in (False, True)] == [False, True]


@pytest.mark.parametrize("in_files", [False, True])
def test_a_template_of_the_models_own_is_chosen_by_its_name(in_files, tmp_path, library):
    directory = write_named(tmp_path, library, in_files)
    tokenizer = Tokenizer(directory, Path("rag"))
    assert tokenizer.render_chat(QUESTION) == tokenizer.render_chat(TOOL) == "None"
    with pytest.raises(TokenizerError, match="own by its name: default, rag, tool_use"):
        Tokenizer(directory, Path("other"))


def test_a_tool_only_template_renders_no_plain_chat(tmp_path, library):
    tokenizer = Tokenizer(write(tmp_path, library, [{"name": "tool_use", "template": "tools"}]))
    assert not tokenizer.has_chat_template
    assert tokenizer.render_chat(TOOL) == "tools"
    with pytest.raises(ServiceError) as caught:
        tokenizer.render_chat(QUESTION)
    assert caught.value.reason is Reason.NO_CHAT_TEMPLATE
