"""What is fetched of a repository on the hub, and how weights that cannot be loaded are named."""

import fnmatch
import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils._paths import filter_repo_objects

from penstock.models.backends.torch_common.device import torch_device
from penstock.models.checkpoint.checkpoint import HUB_FILES, check_checkpoint, resolve_model
from penstock.models.errors import ModelError

READ = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "modules.json",
    "1_Pooling/config.json",
]  # fmt: skip
NEVER_READ = [
    "original/config.json", "original/model.safetensors", "original/consolidated.00.pth", "consolidated.safetensors",
    "consolidated-00001-of-00002.safetensors", "model.fp16.safetensors", "model.fp16-00001-of-00002.safetensors",
    "model-00001-of-00002.fp16.safetensors", "onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.bin",
    "model-Q4_K_M.gguf", "gguf/model.gguf", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "tf_model.h5",
    "flax_model.msgpack", "metal/model.bin", "fp8/model.safetensors", "fp8/model.safetensors.index.json",
    "mtp/model-00001-of-00002.safetensors", "adapter_model.safetensors", "README.md", "a/picture.png", "params.json",
]  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one repository, ``hub(files)``: names, and contents where they count; returns what was fetched."""

    def make(files):
        files = files if isinstance(files, dict) else dict.fromkeys(files, "{}")
        snapshot = tmp_path / "cache" / ("0" * 40)
        fetched = []

        def snapshot_download(name, *, allow_patterns, revision="main"):
            assert name == "owner/model"
            assert revision in ("main", snapshot.name)
            for file in filter_repo_objects(files, allow_patterns=allow_patterns):
                fetched.append(file)
                (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
                (snapshot / file).write_text(files[file])
            return str(snapshot)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name: list(files))
        return fetched

    return make


def index_of(*shards):
    return json.dumps({"weight_map": {f"tensor{number}": shard for number, shard in enumerate(shards)}})


@pytest.mark.parametrize("weights", [["model.safetensors"], ["model-00001-of-00002.safetensors"] * 2])
def test_only_what_is_read_is_fetched(hub, weights):
    files = {**dict.fromkeys([*READ, *NEVER_READ, *weights], "{}")}
    if len(weights) > 1:
        files["model.safetensors.index.json"] = index_of(*weights)
    fetched = hub(files)
    resolve_model("owner/model")
    assert sorted(fetched) == sorted(files.keys() - set(NEVER_READ))


@pytest.mark.parametrize("has_own", [True, False])
def test_other_tokenizers_are_fetched_only_if_there_is_no_tokenizer_json(hub, has_own):
    others = ["tekken.json", "tokenizer.model"]
    never = ["tokenizer.model.v3", "original/tokenizer.model", "consolidated.safetensors"]
    files = ["config.json", "model.safetensors", *(["tokenizer.json"] if has_own else [])]
    fetched = hub([*files, *others, *never])
    resolve_model("owner/model")
    assert sorted(fetched) == sorted(files if has_own else files + others)


def test_shards_of_other_names_are_those_of_the_index(hub):
    shards = ["layers[0].safetensors", "model-1-of-62.safetensors", "model-00002-of-00062.safetensors"]
    files = {"config.json": "{}", "model.safetensors.index.json": index_of(*shards), **dict.fromkeys(shards, "")}
    fetched = hub({**files, "layers0.safetensors": "", "model-2-of-62.safetensors": ""})
    resolve_model("owner/model")
    assert sorted(fetched) == sorted(files)


def test_without_weights_none_are_fetched(hub):
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    fetched = hub({"config.json": "{}", "model.safetensors.index.json": index_of(*shards), **dict.fromkeys(shards, "")})
    resolve_model("owner/model", weights=False)
    assert sorted(fetched) == ["config.json", "model.safetensors.index.json"]
    hub(["config.json", "pytorch_model.bin"])
    assert resolve_model("owner/model", weights=False).is_dir()


OTHERS = {
    "x-Q4_K_M.gguf": "is a GGUF file: choose it with --gguf-file",
    "pytorch_model.bin": "pickled weights are never loaded: use the model's safetensors version",
    "pytorch_model-00001-of-00002.bin": "pickled weights are never loaded",
    "consolidated.00.pth": "pickled weights are never loaded",
    "model.ckpt": "pickled weights are never loaded",
    "weights.bin": "pickled weights are never loaded",
    "consolidated.safetensors": "Mistral's own layout is not supported",
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("besides", [[], ["config.json"], ["config.json", "tokenizer.json"]])
def test_weights_that_cannot_be_loaded_are_named(hub, tmp_path, tiny_model, other, besides):
    hub([*besides, f"folder/{other}" if other.endswith(".gguf") else other])
    with pytest.raises(ModelError, match=rf"owner/model: {other}: {OTHERS[other]}"):
        resolve_model("owner/model")
    for file in [*besides, other]:
        (tmp_path / file).touch()
    if besides:
        (tmp_path / "config.json").write_text((tiny_model("llama").path / "config.json").read_text())
    with pytest.raises(ModelError, match=rf"{tmp_path}: {other}: {OTHERS[other]}"):
        check_checkpoint(tmp_path)
    if other.endswith((".bin", ".pth")):
        with pytest.raises(ModelError, match=rf"^{tmp_path}/{other}: {OTHERS[other]}"):
            resolve_model(str(tmp_path / other))


def test_a_gguf_file_is_found_by_its_path_or_its_name_in_a_directory(tmp_path):
    file = tmp_path / "x.gguf"
    file.touch()
    assert resolve_model(str(file)) == resolve_model(str(tmp_path), gguf_file="x.gguf") == file
    for name in ("owner/model/x.gguf", "./x.gguf", "x.gguf"):
        with pytest.raises(ModelError, match=rf"^{Path(name)}: no such file: give a GGUF file"):
            resolve_model(name)
    with pytest.raises(ModelError, match=rf"^{tmp_path}/y\.gguf: no such file"):
        resolve_model(str(tmp_path), gguf_file="y.gguf")
    for gguf_file in ("../x.gguf", f"{tmp_path}/x.gguf", "x.bin"):
        with pytest.raises(ModelError, match=rf"^--gguf-file {gguf_file}: must be the name of a \.gguf file in"):
            resolve_model(str(tmp_path), gguf_file=gguf_file)
    for model in ("demo", str(file)):
        with pytest.raises(ModelError, match=rf"^--gguf-file x\.gguf: {model} is not a directory or repository"):
            resolve_model(model, gguf_file="x.gguf")


def test_only_the_named_gguf_file_is_fetched_with_its_parts(hub):
    shards = [f"q/m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    fetched = hub(["config.json", "m.gguf", "other.gguf", "model.safetensors", "q/m.gguf", *shards])
    assert resolve_model("owner/model", gguf_file="m.gguf").name == "m.gguf"
    assert fetched == ["m.gguf"]
    fetched.clear()
    assert resolve_model("owner/model", gguf_file=shards[0]).name == "m-00001-of-00003.gguf"
    assert fetched == shards
    with pytest.raises(ModelError, match=r"^--gguf-file z\.gguf: owner/model has no such file"):
        resolve_model("owner/model", gguf_file="z.gguf")


def test_a_hub_that_does_not_answer_leaves_the_missing_file(hub, monkeypatch):
    hub(["config.json", "x.gguf"])

    def fail(self, name):
        raise ConnectionError("out of reach")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    assert (resolve_model("owner/model") / "config.json").is_file()


def test_patterns_do_not_reach_into_folders():
    for pattern in HUB_FILES:
        folder = str(Path(pattern).parent)
        assert folder in (".", "additional_chat_templates", "[0-9]_*")
        assert not fnmatch.fnmatch(f"original/{Path(pattern).name}", pattern)


@pytest.mark.skipif(torch.version.cuda is not None, reason="for a torch without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_torch_without_cuda_is_named(device):
    with pytest.raises(ModelError, match=rf"--device {device}: .* built without CUDA: install a CUDA build of torch"):
        torch_device(device)
