"""Damaged and hostile GGUF files are refused with one line that names the file and what is wrong, and before memory is
taken for what they claim to have."""

import math
import random
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from model_files.gguf_files import write_gguf

from penstock.models.architecture.registry import spec_from_config
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.gguf.config import config_of, described
from penstock.models.checkpoint.gguf.families import FAMILIES
from penstock.models.checkpoint.gguf.header import GgufHeader, read_header
from penstock.models.checkpoint.gguf.tokenizer import tokenizer_files
from penstock.models.errors import ModelError


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, shape: tuple[int, ...] = (4, 8), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def content(*parts: bytes, tensors: int = 0, fields: int = 0, version: int = 3, data: int = 4096) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + b"".join(parts) + bytes(data)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")
ARRAY = text("a") + struct.pack("<I", 9)
BAD = {
    "is 3 bytes long": b"GGU",
    "is not a GGUF file: it begins with b'PK": b"PK\3\4" + bytes(40),
    "is big-endian: convert it with gguf-convert-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40),
    "has version 1 of GGUF": content(version=1),
    "has version 77 of GGUF": content(version=77),
    "has 4,294,967,296 tensors, and a file may have 1,048,576": content(tensors=1 << 32),
    "has 18,446,744,073,709,551,615 fields": content(fields=(1 << 64) - 1),
    "field a has 1,099,511,627,776 items, and may have 4,194,304": content(
        ARRAY, struct.pack("<IQ", 4, 1 << 40), fields=1
    ),
    "is cut off in field a": content(ARRAY, struct.pack("<IQ", 4, 1 << 20), fields=1),
    "is cut off in field a:": content(ARRAY, struct.pack("<IQ", 10, 1 << 20), fields=1),
    "field a has the unknown type 9": content(ARRAY, struct.pack("<IQ", 9, 4), fields=1),
    "field a has the unknown type 13": content(text("a"), struct.pack("<I", 13), fields=1),
    "field a has 1,152,921,504,606,846,976 bytes": content(text("a"), struct.pack("<IQ", 8, 1 << 60), fields=1),
    "a field's name has 1,099,511,627,776 bytes": content(struct.pack("<Q", 1 << 40), fields=1),
    "field a is not UTF-8": content(text("a"), struct.pack("<IQ", 8, 2), b"\xff\xff", fields=1),
    "field a comes twice": content(number("a", 1), number("a", 2), fields=2),
    "general.alignment is 3, and must be a power of two": content(number("general.alignment", 3), fields=1),
    "general.alignment is 0, and must be a power of two": content(number("general.alignment", 0), fields=1),
    "tensor x comes twice": content(tensor("x"), tensor("x", offset=128), tensors=2),
    r"tensor y has the offset 32, where it overlaps another": content(tensor("x"), tensor("y", offset=32), tensors=2),
    r"tensor x has the offset 3, where it overlaps another": content(tensor("x", offset=3), tensors=1),
    "is cut off: tensor x ends at byte": content(tensor("x", (1 << 30, 1 << 30)), tensors=1),
    r"is cut off: tensor x ends at byte 9,223,": content(tensor("x", offset=1 << 63), tensors=1),
    "tensor x has the type 99, which is not supported": content(tensor("x", kind=99), tensors=1),
    r"tensor x \(F32\) has the shape \[0, 4\]": content(tensor("x", (4, 0)), tensors=1),
    r"tensor x \(Q8_0\) has the shape \[8, 48\]": content(tensor("x", (48, 8), kind=8), tensors=1),
    r"tensor x \(Q8_0\) has the shape \[64\]": content(tensor("x", (64,), kind=8), tensors=1),
    "tensor x has 5 dimensions": content(tensor("x", (1, 1, 1, 1, 1)), tensors=1),
    "tensor x has 0 dimensions": content(tensor("x", ()), tensors=1),
    "general.architecture is 'None'": content(),
    "tensor token_embd.weight is missing": content(ARCHITECTURE, fields=1),
    "llama.block_count is missing: download the file again": content(
        ARCHITECTURE, tensor("token_embd.weight"), fields=1, tensors=1
    ),
    "gemma2.block_count is 4294967295: it must be an integer": content(
        text("general.architecture") + struct.pack("<I", 8) + text("gemma2"),
        number("gemma2.block_count", (1 << 32) - 1),
        text("gemma2.attention.sliding_window_pattern") + struct.pack("<I?", 7, True),
        tensor("token_embd.weight"), fields=3, tensors=1,
    ),
    "llama.block_count is 4294967295: it must be an integer from 1 to 1024": content(
        ARCHITECTURE, number("llama.embedding_length", 8), number("llama.attention.head_count", 2),
        number("llama.block_count", (1 << 32) - 1), tensor("token_embd.weight"), fields=4, tensors=1,
    ),
}  # fmt: skip
"""The error, without "it" in front, and the file."""


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_refused(message, tmp_path):
    file = tmp_path / "bad.gguf"
    file.write_bytes(BAD[message])
    with pytest.raises(ModelError, match=rf"^{file}: (it )?{message}") as raised:
        check_checkpoint(file)
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """A file that can be loaded."""
    return write_gguf(tmp_path_factory.mktemp("whole") / "model.gguf", tiny_model("qwen3").module)


def test_a_file_cut_off_anywhere_is_refused(whole, tmp_path):
    data = whole.read_bytes()
    check_checkpoint(whole)
    for length in [*range(0, 2000, 61), len(data) // 2, len(data) - 1]:
        file = tmp_path / "cut.gguf"
        file.write_bytes(data[:length])
        with pytest.raises(ModelError, match=rf"^{file}: "):
            check_checkpoint(file)


def test_a_file_with_flipped_bytes_in_its_header_is_read_or_refused(whole, tmp_path):
    data = bytearray(whole.read_bytes())
    file = tmp_path / "flipped.gguf"
    refusals = []
    for position in range(4, 1500, 13):
        changed = bytearray(data)
        changed[position] = (0, 255, data[position] ^ 1)[position % 3]
        file.write_bytes(changed)
        try:
            check_checkpoint(file)
        except ModelError as error:
            refusals.append(str(error))
    assert refusals
    assert all(refusal.startswith(f"{file}: ") for refusal in refusals)


def rewritten(whole: Path, file: Path, skip: str = "", rename: tuple[str, str] = ("", "")) -> Path:
    """Copies a file without a tensor, or with one under another name."""
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(file, "qwen3")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for each in reader.tensors:
        if each.name != skip:
            writer.add_tensor(rename[1] if each.name == rename[0] else each.name, each.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("sections", [None, [8, 12, 12, 0], [0, 0, 0, 0], [8]])
def test_glm_4_rotates_neighbours_unless_it_sees_images(sections, tiny_model, tmp_path):
    def change(writer):
        if sections is not None:
            writer.add_rope_dimension_sections(sections)

    file = write_gguf(tmp_path / "model.gguf", tiny_model("glm4").module, change=change)
    if sections is None or (len(sections) == 4 and sections[0]):
        assert check_checkpoint(file).spec.interleaved_rope is (sections is None)
        return
    with pytest.raises(ModelError, match=rf"^{file}: glm4\.rope\.dimension_sections is \[.*must begin with two"):
        check_checkpoint(file)


def test_a_missing_or_unknown_tensor_is_named(whole, tmp_path):
    check_checkpoint(rewritten(whole, tmp_path / "same.gguf"))
    file = rewritten(whole, tmp_path / "without.gguf", skip="blk.1.ffn_down.weight")
    with pytest.raises(
        ModelError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight of Qwen3ForCausalLM is missing"
    ):
        check_checkpoint(file)
    file = rewritten(whole, tmp_path / "odd.gguf", rename=("blk.1.attn_q_norm.weight", "blk.1.attn_q_gate.weight"))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.self_attn\.q_norm\.weight"):
        check_checkpoint(file)


def test_a_bias_of_experts_in_blocks_is_refused(tiny_model, tmp_path):
    module = tiny_model("olmoe").module
    kind = gguf.GGMLQuantizationType.Q8_0
    rows = gguf.quants.quantize(np.zeros((module.config.num_experts, 64), np.float32), kind)

    def change(writer):
        writer.add_tensor("blk.0.ffn_down_exps.bias", rows, raw_dtype=kind)

    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_down_exps\.bias has no place"):
        check_checkpoint(write_gguf(tmp_path / "model.gguf", module, change=change))


def test_nothing_is_allocated_for_what_a_file_claims(tmp_path):
    """A sparse file has room for an array of strings that would take gigabytes, and a process with little memory reads
    its header."""
    file = tmp_path / "sparse.gguf"
    file.write_bytes(content(ARRAY, struct.pack("<IQ", 8, 1 << 22), fields=1, tensors=1 << 20))
    with file.open("r+b") as stream:
        stream.truncate(1 << 40)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from penstock.models.checkpoint.gguf.header import read_header\n"
        "from penstock.models.errors import ModelError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: read_header(Path(sys.argv[1]))\n"
        "except ModelError as error: print(error)\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10\n"
    )
    command = [sys.executable, "-P", "-c", code, file]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith(f"{file}: ")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("kind", ["directory", "missing"])
def test_a_path_that_is_no_file_is_refused(kind, tmp_path):
    file = tmp_path / "x.gguf"
    if kind == "directory":
        file.mkdir()
    with pytest.raises(ModelError, match=rf"^{file}"):
        tokenizer_files(file)
    with pytest.raises(ModelError, match=rf"^{file}"):
        read_header(file)
    with pytest.raises(ModelError, match=rf"^{file}"):
        check_checkpoint(file)


def test_parts_of_a_model_are_read_together(whole, tmp_path):
    reader = gguf.GGUFReader(whole)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3", split_max_tensors=10)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for each in reader.tensors:
        writer.add_tensor(each.name, each.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second, *_ = parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    assert {entry.file for entry in check_checkpoint(first).tensors.values()} == set(parts)
    with pytest.raises(
        ModelError, match=rf"^{second}: is not the first of the model's {len(parts)} files: give m-00001"
    ):
        check_checkpoint(second)
    moved = first.rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=rf"^{moved}: is one of {len(parts)} files, and its name does not end like"):
        check_checkpoint(moved)
    moved.rename(first)
    second.unlink()
    with pytest.raises(ModelError, match=rf"^{second}: this file of the model is missing"):
        check_checkpoint(first)


KEYS = {
    "attention.clamp_kqv": None, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
    "attention.key_length_swa": 16, "attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.scale": 0.25, "attention.shared_kv_layers": 0, "attention.sliding_window": 8,
    "attention.sliding_window_pattern": [True, True, True, False], "attention.temperature_scale": 0.1,
    "attention.value_length": 16, "attn_logit_softcapping": 50.0, "block_count": 4, "context_length": 512,
    "embedding_length": 64, "embedding_length_per_layer_input": 0, "embedding_scale": 1.0, "expert_count": 4,
    "expert_feed_forward_length": 32, "expert_group_count": 1, "expert_group_used_count": 1,
    "expert_shared_count": 1, "expert_shared_feed_forward_length": 32, "expert_used_count": 2,
    "expert_weights_norm": True, "expert_weights_scale": 1.0, "feed_forward_length": 128,
    "final_logit_softcapping": 30.0, "interleave_moe_layer_step": 1, "leading_dense_block_count": 1,
    "logit_scale": 1.0, "nextn_predict_layers": 0, "residual_scale": 1.0, "rope.dimension_count": 16,
    "rope.freq_base": 1e4, "rope.freq_base_swa": 1e4, "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 256, "rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 1.0, "use_parallel_residual": True,
}  # fmt: skip
"""Keys that families read, and a value that is valid for most of them."""
ODD = [
    None, "", "x" * 5000, "a\nb", True, False, 0, -1, 1, 3, 2**63, 2**64 - 1, 10**6, 0.0, 1e-300, 1e-45, 1e308, 0.5,
    math.inf, -math.inf, math.nan, [], [1, 2], [True, False, True, False], [1, 1, 1, 1], ["a", "b"],
    [math.nan, 1.0], [[1], [2]], [1.5, 2.5, 3.5, 4.5], [0, 0, 0, 5], [2**63] * 3 + [1], [-1, 0, 1, 2],
]  # fmt: skip


def header_of(family, values):
    """Returns a header with these metadata and no tensor but one."""
    metadata = {f"{family}.{key}": value for key, value in values.items() if value is not None}
    tensors: Any = {"token_embd.weight": SimpleNamespace(shape=(1000, 64))}
    return GgufHeader(Path("x.gguf"), metadata | {"general.architecture": family}, {}, tensors)


def refusal(family, values):
    """Returns the error for the metadata of a family; None if they are accepted."""
    header = header_of(family, values)
    try:
        config, keys = config_of(header)
        try:
            spec_from_config(config)
        except ModelError as error:
            raise described(error, header, keys) from error
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_metadata_are_accepted_or_refused_in_one_line(family):
    rng = random.Random(family)
    for _ in range(300):
        changed = {key: rng.choice(ODD) for key in rng.sample(list(KEYS), rng.choice((1, 1, 2)))}
        found = refusal(family, KEYS | changed)
        assert found is None or (found.startswith("x.gguf: ") and "\n" not in found and len(found) < 700), changed


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [(family, "expert_gating_func", 1) for family in ("dots1", "glm4moe", "minimax-m2")]
    + [(family, "rope.scaling.finetuned", False) for family in ("granite", "granitemoe")],
)
def test_what_a_family_does_not_compute_is_refused(family, key, value):
    supported = 2 if value else True
    assert refusal(family, KEYS | {key: supported}) is None
    expected = f"x.gguf: {family}.{key} is '{value}', and only {supported} is supported: use another model"
    assert refusal(family, KEYS | {key: value}) == expected


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 8.0}, 4.0),
        ({"rope.scale_linear": 8.0}, 8.0),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.factor": 1.0}, None),
        ({"rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({}, None),
    ],
)
def test_a_rope_with_a_factor_is_linear_unless_the_file_denies_it(metadata, factor):
    scaling = {key: None for key in KEYS if key.startswith("rope.scaling.")}
    config, _ = config_of(header_of("llama", KEYS | scaling | metadata))
    rope = config["rope_parameters"]
    assert (rope.get("rope_type"), rope.get("factor")) == (None if factor is None else "linear", factor)
