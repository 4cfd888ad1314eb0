"""The CPU backend's weights: their bits do not depend on how a checkpoint stores them, and they take the memory that
was said, and no more."""

import ctypes
import itertools
import json
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from waiting import wait_until

from penstock.kernels.cpu.bindings import StorageFormat, find_kernels
from penstock.kernels.cpu.program import Library
from penstock.models.backends import memory
from penstock.models.backends.base import load_backend
from penstock.models.backends.cpu.sizes import StorageFormats, max_weight_bytes
from penstock.models.backends.cpu.weights import DummyTensors, Packer
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.quantization.reader import QuantizedMatrix
from penstock.models.checkpoint.quantization.scheme import QuantLayout, QuantScheme
from penstock.models.errors import ModelError
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.plan import AddedRow, Chunk, SamplingParams, StepPlan

pytestmark = pytest.mark.usefixtures("cpu_library")


def at_odd_addresses(file):
    """A space more in the header."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" " * (1 if end % 2 == 0 else 2)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


async def answers_of(path, in_process, start_engine, prompts, **config):
    engine = await start_engine(in_process(path, backend="cpu", **config))
    answers = await engine.run(prompts, SamplingParams(temperature=0.0, logprobs=0), 8)
    return [(answer.token_ids, answer.logprobs) for answer in answers]


async def test_dtype_offset_and_shard_on_disk_do_not_affect_the_bits(
    tiny_model, tmp_path, in_process, start_engine, prompts
):
    """bfloat16 values that float16 holds too, in every dtype, in one file and in several of different dtypes, and at
    odd addresses."""
    model = tiny_model("qwen3")
    tensors = {name: t.half().bfloat16() for name, t in load_file(model.path / "model.safetensors").items()}
    config = (model.path / "config.json").read_text()
    told = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        path = tmp_path / str(dtype)
        path.mkdir()
        (path / "config.json").write_text(config)
        save_file({name: t.to(dtype) for name, t in tensors.items()}, path / "model.safetensors")
        told[str(dtype)] = await answers_of(path, in_process, start_engine, prompts, dtype="bfloat16")

    path = tmp_path / str(torch.bfloat16)
    at_odd_addresses(path / "model.safetensors")
    told["odd"] = await answers_of(path, in_process, start_engine, prompts, dtype="bfloat16")

    path = tmp_path / "shards"
    path.mkdir()
    (path / "config.json").write_text(config)
    shards = {"one.safetensors": torch.float32, "two.safetensors": torch.bfloat16, "three.safetensors": torch.float16}
    parts: dict[str, dict[str, torch.Tensor]] = {name: {} for name in shards}
    weight_map = {}
    for index, (name, t) in enumerate(tensors.items()):
        shard = list(shards)[index % 3]
        parts[shard][name] = t.to(shards[shard])
        weight_map[name] = shard
    for shard, part in parts.items():
        save_file(part, path / shard)
        at_odd_addresses(path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    told["shards"] = await answers_of(path, in_process, start_engine, prompts, dtype="bfloat16")

    expected = told.pop("torch.bfloat16")
    for how, got in told.items():
        assert got == expected, how


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_weight_that_is_no_number_is_refused_where_it_would_be_rounded(
    tiny_model, tmp_path, worker_config, quantization
):
    model = tiny_model("qwen3")
    tensors = load_file(model.path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((model.path / "config.json").read_text())
    with pytest.raises(ModelError, match="not a finite number"):
        load_backend(worker_config(tmp_path, backend="cpu", quantization=quantization))


class GivenMatrices(DummyTensors):
    """Quantised matrices by name, instead of a checkpoint."""

    def __init__(self, matrices):
        self._matrices = matrices

    def quantized(self, name):
        return self._matrices[name]

    def rows(self, name, shape):
        raise AssertionError(name)

    def done(self):
        pass


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_matrices_in_the_same_order_of_columns_become_one(gated, alike):
    rng = np.random.default_rng(2)
    rows, columns = 24, 96
    orders = [rng.permutation(columns).astype(np.int32)] * 2 if alike else list(
        np.stack([rng.permutation(columns) for _ in range(2)]).astype(np.int32)
    )  # fmt: skip
    matrices = {
        name: QuantizedMatrix(
            QuantScheme(QuantLayout.PACKED, 32),
            codes=rng.integers(0, 16, (rows, columns), dtype=np.uint8),
            scales=np.full((rows, 3), 0.5, np.float32),
            zeros=np.full((rows, 3), 8, np.float32),
            order=order.copy(),
        )
        for name, order in zip("ab", orders, strict=True)
    }
    kernels, library = find_kernels(), Library(1)
    assert kernels is not None
    room = library.memory(1 << 20)
    packer = Packer(
        library, kernels, GivenMatrices(matrices), StorageFormat.BF16, room.address, room.address + room.num_bytes
    )
    linear = packer.linear(["a", "b"], [rows, rows], columns, False, gated=gated)
    assert linear.num_parts == (1 if alike else 2)
    # Gate and up alternate by panels of 16, the last of which are filled up.
    places = {"a": [*range(16), *range(32, 40)], "b": [*range(16, 32), *range(48, 56)]}
    for index, (name, matrix) in enumerate(matrices.items()):
        part = linear.parts[0 if alike else index]
        order = list((ctypes.c_int32 * columns).from_address(part.order))
        np.testing.assert_array_equal(order, matrix.order)
        for row in range(rows):
            out = np.full(columns, np.nan, np.float32)
            at = (places[name][row] if gated else rows * index + row) if alike else row
            kernels.unpack_row(part, at, out.ctypes.data)
            np.testing.assert_array_equal(out, matrix.dequantized()[row, matrix.order])


# --------------------------------------------------------------------------------------------------------------- memory

WIDE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 30011, "hidden_size": 512,
    "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
"""A model of 63 million parameters."""
BASE_BYTES = 64 << 20
"""What a worker takes besides weights and KV: Python with numpy, and what a step works in."""


HALF = {
    **WIDE, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 14, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 512,
}  # fmt: skip
"""Half of Qwen3-0.6B, with a smaller vocabulary: weights of 478 MiB."""
WHOLE = {**HALF, "num_hidden_layers": 28, "vocab_size": 151_936}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of 63 million parameters."""
    return write_model(tmp_path_factory.mktemp("wide"), WIDE)


def write_model(path, config):
    """A model whose weights are all zeros, which are no bytes on the disk."""
    (path / "config.json").write_text(json.dumps(config))
    spec = check_checkpoint(path, weights=False).spec
    header, end = {}, 0
    for name, shape in spec.tensors():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def most_ever_taken(pid):
    """Resident bytes, at any time from the process's start."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def needed(path, config):
    info = check_checkpoint(path)
    kernels = find_kernels()
    assert kernels is not None
    quantized = {"int8": StorageFormat.INT8, "int4": StorageFormat.INT4}.get(config.get("quantization", ""))
    formats = StorageFormats(
        quantized or StorageFormat.BF16,
        StorageFormat.INT8 if quantized else StorageFormat.BF16,
        StorageFormat.BF16,
        StorageFormat.BF16,
    )
    return max_weight_bytes(info.spec, formats, info.quantized, kernels)


@pytest.mark.parametrize("model", [HALF, pytest.param(WHOLE, marks=pytest.mark.soak)], ids=["half", "whole"])
async def test_a_worker_of_a_real_shape_takes_little_more_than_weights_and_kv(tmp_path, worker_config, model):
    """At any time until its KV cache is full, nothing set apart. 1024 tokens of KV are little beside the weights, so
    what else it takes has no room to hide."""
    length, num_rows = 512, 2
    kv_bytes = num_rows * length * 2 * 8 * 128 * 2 * model["num_hidden_layers"]
    config = worker_config(
        write_model(tmp_path, model), backend="cpu", dtype="bfloat16", kv_cache_bytes=kv_bytes, num_threads=2
    )
    worker = WorkerProcess(config)
    facts = await worker.start()
    try:
        assert (facts.num_blocks * 16, facts.kv_bytes) == (num_rows * length, kv_bytes)
        results, step = worker.results(), itertools.count()
        for row in range(num_rows):
            blocks = list(range(row * length // 16, (row + 1) * length // 16))
            added = [AddedRow(row, 0, [7] * length, length, 0, blocks, SamplingParams(temperature=0.0))]
            for begin in range(0, length, 256):
                worker.submit(StepPlan(next(step), [], added, [], [Chunk(row, begin, begin + 256)], []))
                added = []
                await anext(results)
        taken = most_ever_taken(worker.pid)
    finally:
        await worker.stop()
    print(f"{taken / (facts.weight_bytes + facts.kv_bytes):.3f} of {facts.weight_bytes >> 20} MiB and KV")
    assert facts.weight_bytes + facts.kv_bytes < taken <= 1.15 * (facts.weight_bytes + facts.kv_bytes)


@pytest.mark.parametrize("quantization", ["none", "int8", pytest.param("int4", marks=pytest.mark.soak)])
async def test_a_workers_memory_is_weights_kv_and_little_more(wide, worker_config, quantization):
    config = worker_config(wide, backend="cpu", dtype="bfloat16", quantization=quantization, kv_cache_bytes=32 << 20)
    worker = WorkerProcess(config)
    facts = await worker.start()
    try:
        prompt = list(range(1000))
        blocks = list(range(64))
        added = AddedRow(0, 0, prompt, len(prompt), 0, blocks, SamplingParams(temperature=0.0))
        worker.submit(StepPlan(0, [], [added], [], [Chunk(0, 0, 512)], []))
        worker.submit(StepPlan(1, [], [], [], [Chunk(0, 512, 1000)], []))
        results = worker.results()
        for _ in range(2):
            await anext(results)
        taken = most_ever_taken(worker.pid)
    finally:
        await worker.stop()
    assert facts.weight_bytes < taken <= 1.15 * (facts.weight_bytes + facts.kv_bytes) + BASE_BYTES
    assert facts.weight_bytes <= needed(wide, {"quantization": quantization}) <= 1.02 * facts.weight_bytes


def test_what_a_backend_took_goes_with_it(wide, worker_config):
    """A process may load several, one after another."""
    process = psutil.Process()
    config = worker_config(wide, backend="cpu", dtype="bfloat16", num_threads=3)
    load_backend(config)
    threads, before = process.num_threads(), process.memory_info().rss
    for _ in range(2):
        load_backend(config)
    # The threads that fill pages ahead may not have noticed yet that the pages are not needed.
    wait_until(lambda: process.memory_info().rss < before + (64 << 20))
    assert process.num_threads() <= threads + 1


@pytest.mark.parametrize(("quantization", "name"), [("none", "bfloat16"), ("int8", "int8"), ("int4", "int4")])
def test_weights_that_do_not_fit_are_refused_by_what_they_need(wide, worker_config, monkeypatch, quantization, name):
    bytes_needed = needed(wide, {"quantization": quantization})
    config = worker_config(wide, backend="cpu", dtype="bfloat16", quantization=quantization)
    monkeypatch.setattr(memory, "free_bytes", lambda device, limit, num_ranks: bytes_needed - 1)
    with pytest.raises(ModelError, match=f"its weights need .* as {name}, and cpu has .* free: choose .*--dtype"):
        load_backend(config)
    assert bytes_needed == pytest.approx({"none": 126e6, "int8": 80e6, "int4": 65e6}[quantization], rel=0.1)


@pytest.mark.parametrize(("at_least", "says"), [(0, "weights of .* cannot be allocated"), (1 << 25, "the KV cache of")])
def test_memory_that_the_system_refuses(tiny_model, worker_config, monkeypatch, at_least, says):
    """It may limit a process without telling."""
    take = Library.memory

    def refuse(library, num_bytes):
        if num_bytes > at_least:
            raise MemoryError
        return take(library, num_bytes)

    monkeypatch.setattr(Library, "memory", refuse)
    with pytest.raises(ModelError, match=f"{says}.*lower|{says}.*choose"):
        load_backend(worker_config(tiny_model("llama").path, backend="cpu"))
