"""``penstock serve`` as a process, and a small model for it to serve."""

import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model

PENSTOCK = Path(sys.executable).with_name("penstock")
SHARD_A, SHARD_B = "a.safetensors", "b.safetensors"
GREETING_ENDS = "Ctrl-C stops it."


@contextmanager
def serving(
    *arguments: object, command: tuple[object, ...] = (PENSTOCK, "serve"), **options: Any
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a process that serves, and yields it and what it printed; kills it at the end if it still runs."""
    process = subprocess.Popen(
        [str(each) for each in (*command, *arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if GREETING_ENDS in line:
                break
        else:
            pytest.fail(f"it never served: {process.communicate()[1]}")
        yield process, "".join(lines)
    finally:
        process.kill()
        process.communicate()


def target_of(greeting: str) -> str:
    match = re.match(r"penstock \S+ serves \S+ on (\S+)", greeting)
    assert match is not None, greeting
    return match[1]


def http_target_of(greeting: str) -> str:
    """Returns the host and port of OpenAI's API."""
    match = re.search(r"API at http://(\S+)/v1", greeting)
    assert match is not None, greeting
    return match[1]


def write_small_model(directory: Path) -> Path:
    """Writes the demo's tokenizer and a tiny model of two shards."""
    demo = resolve_model(DEMO)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, directory)
    config = json.loads((demo / "config.json").read_text())
    tokenizer_size = json.loads((demo / "tokenizer.json").read_text())["added_tokens"][-1]["id"] + 1
    config |= {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": tokenizer_size}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}
    config.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": [tokenizer_size, 16],
        f"{layer}.input_layernorm.weight": [16],
        f"{layer}.self_attn.q_proj.weight": [16, 16],
        f"{layer}.self_attn.k_proj.weight": [8, 16],
        f"{layer}.self_attn.v_proj.weight": [8, 16],
        f"{layer}.self_attn.o_proj.weight": [16, 16],
        f"{layer}.self_attn.q_norm.weight": [8],
        f"{layer}.self_attn.k_norm.weight": [8],
        f"{layer}.post_attention_layernorm.weight": [16],
        f"{layer}.mlp.gate_proj.weight": [16, 16],
        f"{layer}.mlp.up_proj.weight": [16, 16],
        f"{layer}.mlp.down_proj.weight": [16, 16],
        "model.norm.weight": [16],
    }
    names = list(shapes)
    shards = {SHARD_A: names[:6], SHARD_B: names[6:]}
    for shard, held in shards.items():
        write_shard(directory / shard, {name: shapes[name] for name in held})
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_shard(path: Path, shapes: dict[str, list[int]], dtype: str = "F32", size: int = 4) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + size * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end))
