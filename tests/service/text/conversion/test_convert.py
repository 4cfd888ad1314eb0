"""Which of a model's files describes its tokenizer, and what the files beside it add."""

import json
import re
import shutil

import pytest

from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.errors import Reason, ServiceError
from penstock.service.text.conversion.convert import SENTENCEPIECE, TEKKEN, TIKTOKEN, convert_tokenizer
from penstock.service.text.tokenizer_config import TokenizerError
from penstock.service.text.tokenizer_files import TOKENIZER, predict_facts

from .conftest import MISTRAL, train
from .test_tekken import NUM_SPECIAL, write


def test_tokenizer_json_wins_and_tekken_json_before_tokenizer_model(tmp_path, byte_tokenizer_path):
    directory, into = tmp_path / "model", tmp_path / "into"
    directory.mkdir()
    into.mkdir()
    assert convert_tokenizer(directory, into) is None
    train(directory)
    for name, add in ((SENTENCEPIECE, lambda: None), (TEKKEN, lambda: write(directory))):
        add()
        converted = convert_tokenizer(directory, into)
        assert converted is not None
        assert converted.origin == directory / name
        assert [each.name for each in into.iterdir()] == [TOKENIZER]
    (into / TOKENIZER).unlink()
    shutil.copy(byte_tokenizer_path / TOKENIZER, directory)
    assert convert_tokenizer(directory, into) is None
    assert not list(into.iterdir())


def test_a_directory_without_a_tokenizer_is_told_which_files_it_may_have(tmp_path, serve):
    with pytest.raises(TokenizerError) as caught:
        serve(tmp_path)
    assert re.fullmatch(
        rf"{tmp_path}/tokenizer\.json: is missing: fetch it, or tekken\.json, tokenizer\.model or tiktoken\.model, or "
        r"make a tokenizer\.json with AutoTokenizer\.\S+ of transformers",
        str(caught.value),
    )


@pytest.mark.parametrize(("name", "mib"), [(TEKKEN, 128), (SENTENCEPIECE, 16), (TIKTOKEN, 16)])
def test_a_file_that_is_too_large_is_not_read(name, mib, tmp_path, serve):
    with open(tmp_path / name, "wb") as stream:
        stream.truncate((mib << 20) + 1)
    with pytest.raises(TokenizerError, match=rf"^{tmp_path / name}: is larger than {mib} MiB"):
        serve(tmp_path)


def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path, serve):
    (tmp_path / TEKKEN).mkdir()
    with pytest.raises(TokenizerError, match=rf"^{tmp_path / TEKKEN}: cannot be read: it is a directory"):
        serve(tmp_path)


def test_named_tokens_need_no_configuration(tmp_path, serve):
    """They are variables of a template, and the configuration replaces them."""
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ unk_token }}")
    chat = TemplateInput([TemplateMessage("user", "x")])
    tokenizer = serve(tmp_path)
    assert (tokenizer.encode_chat(chat), tokenizer.eos_token_ids) == ([1, 2, 0], (2,))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[/INST]", "unk_token": null}')
    tokenizer = serve(tmp_path)
    assert (tokenizer.encode_chat(chat)[:2], tokenizer.eos_token_ids) == ([1, 4], (4,))


def test_facts_are_predicted_and_added_tokens_come_after_the_others(tmp_path, serve):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": ["<|new|>"]}))
    facts = serve(tmp_path).facts
    assert facts.added_tokens == ((2000 + NUM_SPECIAL, "<|new|>"),)
    (tmp_path / "into").mkdir()
    assert predict_facts(tmp_path, converted=convert_tokenizer(tmp_path, tmp_path / "into")) == facts


def test_a_model_without_a_template_names_the_flag(tmp_path, serve):
    shutil.copy(MISTRAL / "tokenizer.model.v1", tmp_path / SENTENCEPIECE)
    with pytest.raises(ServiceError) as caught:
        serve(tmp_path).encode_chat(TemplateInput([TemplateMessage("user", "x")]))
    assert caught.value.reason is Reason.NO_CHAT_TEMPLATE
    assert "--chat-template" in str(caught.value)


def test_broken_configurations_are_named(tmp_path, serve):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=rf"^{tmp_path}/tokenizer_config\.json: is not valid JSON"):
        serve(tmp_path)
