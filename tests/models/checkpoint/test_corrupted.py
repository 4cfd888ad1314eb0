"""Figure 18: corrupted model directories. The file and the field are named, within 10 s, and nothing is ever served."""

import asyncio
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.models.backends.base import load_backend
from penstock.models.checkpoint.checkpoint import INDEX, SINGLE, check_checkpoint
from penstock.models.checkpoint.info import CONFIG
from penstock.models.errors import ModelError
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.engine import Engine

SHARD = "model-00002-of-00003.safetensors"
Header = dict[str, Any]


def config(**changes):
    """Changes config.json; ``...`` removes a field."""

    def corrupt(path: Path) -> None:
        values = json.loads((path / CONFIG).read_text())
        for name, value in changes.items():
            values.pop(name, None)
            if value is not ...:
                values[name] = value
        (path / CONFIG).write_text(json.dumps(values))

    return corrupt


def rope(**values):
    return config(rope_parameters={"rope_theta": 1e4, **values})


def content(name: str, data: bytes):
    return lambda path: (path / name).write_bytes(data)


def remove(name: str):
    return lambda path: (path / name).unlink()


def read_shard(path: Path, name: str) -> tuple[Header, bytes]:
    data = (path / name).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_shard(path: Path, name: str, header: object, data: bytes) -> None:
    encoded = json.dumps(header).encode()
    (path / name).write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def header(name: str, change: Callable[[Header], object]):
    """Rewrites the header of a shard."""

    def corrupt(path: Path) -> None:
        values, data = read_shard(path, name)
        changed = change(values)
        write_shard(path, name, values if changed is None else changed, data)

    return corrupt


def tensor(change: Callable[[Header], object], name: str = SHARD):
    """Changes the entry of the first tensor in a shard's data."""

    def corrupt(values: Header) -> None:
        change(first_entry(values))

    return header(name, corrupt)


def first_entry(values: Header) -> Header:
    return min((v for k, v in values.items() if k != "__metadata__"), key=lambda entry: entry["data_offsets"])


def drop_tensor(path: Path) -> None:
    """Removes the last tensor of the shard, its bytes and its line in the index."""
    values, data = read_shard(path, SHARD)
    name = max((k for k in values if k != "__metadata__"), key=lambda k: values[k]["data_offsets"])
    entry = values.pop(name)
    write_shard(path, SHARD, values, data[: entry["data_offsets"][0]])
    index = json.loads((path / INDEX).read_text())
    del index["weight_map"][name]
    (path / INDEX).write_text(json.dumps(index))


def rename_tensor(path: Path) -> None:
    """One tensor gets a name that no model has."""
    values, data = read_shard(path, SHARD)
    name = next(k for k in values if k.endswith("norm.weight"))
    write_shard(path, SHARD, {("model.oops" if k == name else k): v for k, v in values.items()}, data)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.oops"] = index["weight_map"].pop(name)
    (path / INDEX).write_text(json.dumps(index))


def index(change: Callable[[Header], object]):
    def corrupt(path: Path) -> None:
        values = json.loads((path / INDEX).read_text())
        change(values)
        (path / INDEX).write_text(json.dumps(values))

    return corrupt


def truncate(name: str, num_bytes: int):
    """Cuts bytes off the end."""

    def corrupt(path: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[:-num_bytes])

    return corrupt


def append(name: str, tail: bytes):
    return lambda path: (path / name).write_bytes((path / name).read_bytes() + tail)


def pickled(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), path / INDEX]:
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def no_weights(path: Path) -> None:
    for file in [*path.glob("*.safetensors"), path / INDEX]:
        file.unlink()


def a_directory(name: str):
    def corrupt(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    return corrupt


def map_to(shard: object):
    return index(lambda values: values["weight_map"].update({"model.norm.weight": shard}))


def set_entry(**changes):
    return lambda entry: entry.update(changes)


# What is done to a good directory (Llama, three shards), and what the error must name.
CORRUPTIONS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "config is missing": (remove(CONFIG), [CONFIG, "missing"]),
    "config is empty": (content(CONFIG, b""), [CONFIG, "JSON"]),
    "config is cut": (truncate(CONFIG, 20), [CONFIG, "JSON"]),
    "config is a list": (content(CONFIG, b"[1, 2]"), [CONFIG, "object"]),
    "config is binary": (content(CONFIG, b"\xff\xfe\x00{}"), [CONFIG, "JSON"]),
    "config nests deeply": (content(CONFIG, b"[" * 100_000), [CONFIG, "JSON"]),
    "config is a directory": (a_directory(CONFIG), [CONFIG, "read"]),
    "no architectures": (config(architectures=...), [CONFIG, "architectures"]),
    "architectures is a string": (config(architectures="LlamaForCausalLM"), [CONFIG, "architectures"]),
    "unknown architecture": (
        config(architectures=["MambaForCausalLM"]),
        [CONFIG, "architectures", "Mamba", "--backend transformers"],
    ),
    "quantised": (config(quantization_config={"quant_method": "awq"}), [CONFIG, "quantization_config"]),
    "hidden_size is negative": (config(hidden_size=-64), [CONFIG, "hidden_size", "-64"]),
    "hidden_size is missing": (config(hidden_size=...), [CONFIG, "hidden_size"]),
    "hidden_size is a string": (config(hidden_size="64"), [CONFIG, "hidden_size"]),
    "hidden_size is true": (config(hidden_size=True), [CONFIG, "hidden_size"]),
    "hidden_size is another": (config(hidden_size=128, head_dim=16), ["tensor model.embed_tokens.weight", CONFIG]),
    "hidden_size is not divisible": (config(hidden_size=66, head_dim=...), [CONFIG, "hidden_size"]),
    "num_hidden_layers is 0": (config(num_hidden_layers=0), [CONFIG, "num_hidden_layers"]),
    "num_hidden_layers is huge": (config(num_hidden_layers=10**9), [CONFIG, "num_hidden_layers"]),
    "one layer more": (config(num_hidden_layers=4), ["tensor model.layers.3."]),
    "one layer less": (config(num_hidden_layers=2), ["tensor model.layers.2."]),
    "heads do not divide": (config(num_key_value_heads=3), [CONFIG, "num_key_value_heads"]),
    "head_dim is odd": (config(head_dim=17), [CONFIG, "head_dim"]),
    "vocab_size is a float": (config(vocab_size=160.5), [CONFIG, "vocab_size"]),
    "vocab_size is another": (config(vocab_size=161), ["model.embed_tokens.weight", "161"]),
    "intermediate_size is another": (config(intermediate_size=97), ["gate_proj", "97"]),
    "rms_norm_eps is NaN": (config(rms_norm_eps=float("nan")), [CONFIG, "rms_norm_eps"]),
    "hidden_act is unknown": (config(hidden_act="relu9"), [CONFIG, "hidden_act", "relu9"]),
    "attention_bias is a string": (config(attention_bias="no"), [CONFIG, "attention_bias"]),
    "biases that are not there": (config(attention_bias=True), ["q_proj.bias"]),
    "max_position_embeddings is 0": (config(max_position_embeddings=0), [CONFIG, "max_position_embeddings"]),
    "rope type is unknown": (rope(rope_type="spiral"), [CONFIG, "rope_type", "spiral"]),
    "rope is a number": (config(rope_parameters=3), [CONFIG, "rope_parameters"]),
    "rope factor is missing": (rope(rope_type="linear"), [CONFIG, "rope_parameters.factor"]),
    "rope factor is negative": (rope(rope_type="yarn", factor=-4), [CONFIG, "rope_parameters.factor"]),
    "rope factors cross": (
        rope(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=1),
        [CONFIG, "high_freq_factor"],
    ),
    "half of each head is rotated": (config(partial_rotary_factor=0.5), [CONFIG, "partial_rotary_factor"]),
    "shard is missing": (remove(SHARD), [SHARD, "missing"]),
    "shard is empty": (content(SHARD, b""), [SHARD]),
    "shard is cut by a byte": (truncate(SHARD, 1), [SHARD, "truncated"]),
    "shard is cut by half": (truncate(SHARD, 20_000), [SHARD, "truncated"]),
    "shard has a tail": (append(SHARD, b"xx"), [SHARD, "bytes"]),
    "shard is text": (content(SHARD, b"<!DOCTYPE html><html>not found</html>"), [SHARD, "header"]),
    "shard is a pointer of git": (content(SHARD, b"version https://git-lfs.github.com/spec/v1\n"), [SHARD, "header"]),
    "header's length is huge": (
        lambda path: (path / SHARD).write_bytes(b"\xff" * 8 + (path / SHARD).read_bytes()[8:]),
        [SHARD, "header"],
    ),
    "header's length is short": (
        lambda path: (path / SHARD).write_bytes(struct.pack("<Q", 9) + (path / SHARD).read_bytes()[8:]),
        [SHARD, "header"],
    ),
    "header is a list": (header(SHARD, lambda values: [1]), [SHARD, "header"]),
    "header's entry is a number": (header(SHARD, lambda values: {**values, "extra": 1}), [SHARD, "extra"]),
    "dtype is unknown": (tensor(set_entry(dtype="F23")), [SHARD, "F23"]),
    "dtype is a list": (tensor(set_entry(dtype=["F32"])), [SHARD, "dtype", "['F32']"]),
    "dtype is an object": (tensor(set_entry(dtype={"F32": 1})), [SHARD, "dtype", "F32"]),
    "dtype is null": (tensor(set_entry(dtype=None)), [SHARD, "dtype", "None"]),
    "dtype is long": (tensor(set_entry(dtype="F" * 1_000_000)), [SHARD, "dtype", "FFF"]),
    "shape is deep": (tensor(set_entry(shape=[[[4]]])), [SHARD, "shape"]),
    "shape has many dimensions": (tensor(set_entry(shape=[1] * 17)), [SHARD, "shape"]),
    "shape is a text": (tensor(set_entry(shape="4")), [SHARD, "shape"]),
    "shape has a number of many digits": (tensor(set_entry(shape=[10**300])), [SHARD]),
    "offsets are floats": (tensor(set_entry(data_offsets=[0.0, 64.0])), [SHARD, "data_offsets"]),
    "a tensor's name is long": (header(SHARD, lambda values: {**values, "x" * 1_000_000: 1}), [SHARD, "1,000,000"]),
    "dtype is an integer's": (tensor(set_entry(dtype="I32")), [SHARD, "dtype", "I32"]),
    "shape is another": (tensor(lambda entry: entry["shape"].insert(0, 1)), [SHARD, "shape"]),
    "shape is negative": (tensor(set_entry(shape=[-1, 4])), [SHARD, "shape"]),
    "shape does not fit the bytes": (tensor(set_entry(shape=[3, 5])), [SHARD, "data_offsets"]),
    "offsets run backwards": (tensor(set_entry(data_offsets=[64, 0])), [SHARD, "data_offsets"]),
    "offsets are negative": (tensor(set_entry(data_offsets=[-8, 8])), [SHARD, "data_offsets"]),
    "offsets overlap": (
        tensor(lambda entry: entry.update(data_offsets=[offset + 64 for offset in entry["data_offsets"]])),
        [SHARD, "data_offsets"],
    ),
    "offsets are missing": (tensor(lambda entry: entry.pop("data_offsets")), [SHARD, "data_offsets"]),
    "tensor is missing": (drop_tensor, ["tensor", "missing"]),
    "tensor is of no model": (rename_tensor, ["tensor", "missing"]),
    "index is no JSON": (content(INDEX, b"{"), [INDEX, "JSON"]),
    "index has no map": (index(lambda values: values.pop("weight_map")), [INDEX, "weight_map"]),
    "index points outside": (map_to("../../secret.safetensors"), [INDEX, "weight_map", "secret"]),
    "index points at a pickle": (map_to("model.bin"), [INDEX, "weight_map", "model.bin"]),
    "index points at a number": (map_to(7), [INDEX, "weight_map"]),
    "index points at the wrong shard": (map_to("model-00001-of-00003.safetensors"), ["model.norm.weight", "00001"]),
    "weights are pickled": (pickled, ["pytorch_model.bin", "pickled"]),
    "no weights": (no_weights, [SINGLE, "missing"]),
}


@pytest.fixture(scope="session")
def good(tmp_path_factory, tiny_model):
    """A model in three shards."""
    path = tmp_path_factory.mktemp("shards")
    tiny_model("llama").module.save_pretrained(path, max_shard_size="180KB")
    assert len(list(path.glob("*.safetensors"))) == 3
    check_checkpoint(path)
    return path


@pytest.fixture
def corrupted(good, tmp_path):
    def make(name):
        path = tmp_path / "model"
        shutil.copytree(good, path)
        CORRUPTIONS[name][0](path)
        return path

    return make


def check_message(text: str, names: list[str]) -> None:
    assert "\n" not in text
    assert all(name in text for name in names), text
    # ... and the remedy comes after a colon.
    assert len(text.rsplit(": ", 1)) == 2, text


def test_reliability_figure_18_has_50_corruptions():
    assert len(CORRUPTIONS) >= 50


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_reliability_figure_18_file_and_field_are_named(name, corrupted, worker_config):
    path = corrupted(name)
    with pytest.raises(ModelError) as caught:
        load_backend(worker_config(path))
    check_message(str(caught.value), CORRUPTIONS[name][1])


@pytest.mark.parametrize("name", ["shard is cut by a byte", "unknown architecture", "tensor is missing"])
async def test_reliability_figure_18_is_never_serving(name, corrupted, worker_config):
    states: list[EngineState] = []
    engine = Engine(WorkerProcess(worker_config(corrupted(name))))
    engine.watch(states.append)
    async with asyncio.timeout(120):
        with pytest.raises(ExecutorError) as caught:
            await engine.start()
    check_message(str(caught.value), CORRUPTIONS[name][1])
    await engine.stop()
    assert EngineState.SERVING not in states
