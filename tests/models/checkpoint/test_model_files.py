"""A model's files come from strangers: what is no regular file, or far too large, is named and never read."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from penstock.models.checkpoint.checkpoint import DEMO, INDEX, SINGLE, check_checkpoint, resolve_model
from penstock.models.checkpoint.files.model_files import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_CONFIG_BYTES,
)
from penstock.models.checkpoint.info import CONFIG
from penstock.models.checkpoint.pooling_config import read_embedding
from penstock.models.errors import ModelError
from penstock.service.config.sampling_defaults import AUTO, read_sampling_defaults
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.tokenizer_config import TokenizerError
from penstock.service.text.tokenizer_files import predict_facts

LIMITS = {
    CONFIG: MAX_CONFIG_BYTES,
    INDEX: MAX_INDEX_BYTES,
    "generation_config.json": MAX_CONFIG_BYTES,
    "modules.json": MAX_CONFIG_BYTES,
    "1_Pooling/config.json": MAX_CONFIG_BYTES,
    "tokenizer.json": MAX_TOKENIZER_BYTES,
    "tokenizer_config.json": MAX_TOKENIZER_CONFIG_BYTES,
    "special_tokens_map.json": MAX_TOKENIZER_CONFIG_BYTES,
    "added_tokens.json": MAX_TOKENIZER_CONFIG_BYTES,
    "chat_template.jinja": MAX_TEMPLATE_BYTES,
    "additional_chat_templates/tool_use.jinja": MAX_TEMPLATE_BYTES,
}
NAMES = [*LIMITS, SINGLE]


def a_pipe(file):
    os.mkfifo(file)


def a_device(file):
    file.symlink_to("/dev/zero")


def a_directory(file):
    file.mkdir()


def a_socket(file):
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(file.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{folder}/{file.name}")  # a socket's path may have 107 bytes
        os.close(folder)


@pytest.fixture
def model(tmp_path):
    """A copy of the demo, without weights."""
    target = tmp_path / "model"
    shutil.copytree(resolve_model(DEMO), target, ignore=lambda _, names: {SINGLE} & {*names})
    (target / SINGLE).symlink_to(resolve_model(DEMO) / SINGLE)
    return target


def place(model, name, make):
    file = model / name
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    make(file)


def read_all(model):
    """Everything that a service reads before it starts a worker."""
    check_checkpoint(model)
    read_sampling_defaults(model, AUTO)
    read_embedding(model)
    predict_facts(model)
    Tokenizer(model)


def test_a_link_to_a_regular_file_is_read(model):
    read_all(model)


@pytest.mark.parametrize("make", [a_pipe, a_device, a_directory, a_socket])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_regular_file_is_named(model, name, make):
    place(model, name, make)
    with pytest.raises(
        (ModelError, TokenizerError), match=r"cannot be read: it is .* must be a regular file"
    ) as refused:
        read_all(model)
    assert Path(name).name in str(refused.value)


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_too_large_is_named(model, name):
    place(model, name, lambda file: os.truncate(os.open(file, os.O_CREAT | os.O_WRONLY), LIMITS[name] + 1))
    with pytest.raises((ModelError, TokenizerError), match=f"is larger than {LIMITS[name] >> 20} MiB") as refused:
        read_all(model)
    assert Path(name).name in str(refused.value)


@pytest.mark.parametrize("name", [CONFIG, "tokenizer.json", "tokenizer_config.json", SINGLE])
@pytest.mark.parametrize("target", ["/proc/self/environ", "/proc/self/status"])
def test_a_file_of_the_kernels_has_no_content(model, name, target):
    place(model, name, lambda file: file.symlink_to(target))
    with pytest.raises((ModelError, TokenizerError), match=r"valid|0 bytes long"):
        read_all(model)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_template_is_no_link_to_a_secret(model, name, tmp_path):
    """Any caller could read it in a rendered conversation."""
    (tmp_path / "secret").write_text("sesame")
    place(model, name, lambda file: file.symlink_to(tmp_path / "secret"))
    with pytest.raises(TokenizerError, match=r"jinja: is a link out of the model's directory"):
        Tokenizer(model)


def test_a_template_may_be_a_link_within_the_model(model):
    (model / "..data").mkdir()
    (model / "..data" / "chat_template.jinja").write_text("within")
    (model / "chat_template.jinja").symlink_to("..data/chat_template.jinja")
    assert Tokenizer(model).has_chat_template


def test_the_hubs_cache_has_links_to_blobs(model, tmp_path):
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    blobs = repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (model / "chat_template.jinja").write_text("a blob")
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    read_all(snapshot)


def test_too_many_templates_are_refused(model):
    (model / "additional_chat_templates").mkdir()
    for number in range(65):
        (model / "additional_chat_templates" / f"{number}.jinja").write_text("")
    with pytest.raises(TokenizerError, match="has 65 chat templates, and may have 64"):
        Tokenizer(model)


@pytest.mark.parametrize("mode", [["cls"], {"a": 1}, 5, "other"])
def test_a_pooling_mode_is_a_word(model, mode):
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    with pytest.raises(ModelError, match=r"config\.json: pooling_mode is"):
        read_embedding(model)
