"""A GGUF file is served with the tokenizer, the template and the constraints of the model that it was made from."""

import glob
import json
import re
import subprocess
import tempfile
from pathlib import Path

import gguf
import pytest
import transformers
from model_files.gguf_files import add_tokenizer, write_gguf
from safetensors.torch import load_file
from serve_process import PENSTOCK, SHARD_A, SHARD_B, write_small_model

from penstock.clients import Client
from penstock.service.app.embedded import local_service

PROMPT = "Once upon a time"
FLAGS = {"dtype": "float32", "threads": 1, "kv_cache_memory_bytes": "4M", "backend": "reference"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Hugging Face's layout, and beside it ``small.gguf``."""
    path = write_small_model(tmp_path_factory.mktemp("small"))
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    tensors = load_file(path / SHARD_A) | load_file(path / SHARD_B)
    module.float().load_state_dict(tensors, strict=False)
    described, config = (json.loads((path / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))

    def change(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, described, config, pre="deepseek-r1-qwen")

    write_gguf(path / "small.gguf", module, change=change)
    return path


def test_a_gguf_file_gives_the_same_texts_as_its_model(directory: Path) -> None:
    found = []
    for model, flags in ((str(directory), {}), (str(directory), {"gguf_file": "small.gguf"})):
        with local_service(model, **FLAGS, **flags) as target, Client(target) as client:
            text = client.complete(PROMPT, max_tokens=16, temperature=0.0).text
            digits = client.complete(PROMPT, max_tokens=8, temperature=0.0, constraint={"regex": "[0-9]{3}"}).text
            described = client.model()
            found.append((text, digits, described.vocab_size, described.architecture))
    assert found[0] == found[1]
    assert re.fullmatch("[0-9]{3}", found[1][1])
    assert not glob.glob(f"{tempfile.gettempdir()}/penstock-*/small.gguf")


def test_a_damaged_file_ends_with_one_line_and_status_1(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes((directory / "small.gguf").read_bytes()[:-100])
    done = subprocess.run(
        [PENSTOCK, "serve", file, "--port=0"], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(rf"penstock serve: {file}: it is cut off: tensor \S+ ends at byte .*\n", done.stderr)
