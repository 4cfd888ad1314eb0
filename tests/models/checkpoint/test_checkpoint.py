"""Where models are found, and what a config says, in transformers' new form and in that of older checkpoints."""

import copy
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.models.architecture.registry import spec_from_config
from penstock.models.architecture.rope import inverse_frequencies
from penstock.models.architecture.spec_parts import Activation, DefaultRope, LinearRope, Llama3Rope, QkNorm, YarnRope
from penstock.models.checkpoint.checkpoint import DEMO, check_checkpoint, resolve_model
from penstock.models.checkpoint.info import CONFIG
from penstock.models.errors import ModelError

# As published: the fields of these models' config.json that matter here.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B_V01 = {
    "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
QWEN2_05B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [(LLAMA_31_8B, 8_030_261_248), (MISTRAL_7B_V01, 7_241_732_096), (QWEN2_05B, 494_032_768), (QWEN3_06B, 596_049_920)],
)
def test_published_configs_have_their_published_sizes(config, num_parameters):
    assert spec_from_config(config).num_parameters == num_parameters


def test_published_details():
    llama = spec_from_config(LLAMA_31_8B)
    assert llama.ropes[0] == Llama3Rope(500000.0, 8.0, 1.0, 4.0, 8192)
    assert (llama.max_positions, llama.head_dim, llama.windows[0]) == (131072, 128, None)
    assert llama.kv_bytes_per_token(2) == 131072
    assert set(spec_from_config(MISTRAL_7B_V01).windows) == {4096}
    qwen2 = spec_from_config(QWEN2_05B)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.tied_embeddings) == (True, False, True)
    assert set(qwen2.windows) == {None}
    qwen3 = spec_from_config(QWEN3_06B)
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.query_size, qwen3.ropes[0]) == (
        QkNorm.HEAD,
        False,
        2048,
        DefaultRope(1e6),
    )


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (None, None, 8, 8)),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4,
             "layer_types": ["sliding_attention", "full_attention"] * 2},
            (8, None, 8, None),
        ),
    ],
)  # fmt: skip
def test_windows_of_qwen2(changes, windows):
    assert spec_from_config({**QWEN2_05B, "num_hidden_layers": 4, **changes}).windows == windows


def test_windows_of_mistral():
    assert set(spec_from_config({**MISTRAL_7B_V01, "sliding_window": None}).windows) == {None}
    absent = {name: value for name, value in MISTRAL_7B_V01.items() if name != "sliding_window"}
    assert set(spec_from_config(absent).windows) == {4096}  # transformers leaves out what is its default


@pytest.mark.parametrize(
    ("old", "rope", "max_positions"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, LinearRope(1e6, 4.0), 163840),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
            YarnRope(1e6, 4.0, 32768, 32.0, 1.0, 1.1386294361119891, True),
            131072,
        ),
        ({"rope_scaling": {"rope_type": "default"}}, DefaultRope(1e6), 40960),
    ],
)
def test_old_and_new_forms_of_rope_mean_the_same(old, rope, max_positions):
    old_spec = spec_from_config({**QWEN3_06B, **old})
    values = dict(old["rope_scaling"])
    values.setdefault("rope_type", values.pop("type", None))
    without = {name: value for name, value in QWEN3_06B.items() if not name.startswith("rope")}
    new_spec = spec_from_config({**without, "rope_parameters": {"rope_theta": 1e6, **values}})
    assert old_spec == new_spec
    assert (old_spec.ropes[0], old_spec.max_positions) == (rope, max_positions)


def test_activations():
    assert spec_from_config({**QWEN3_06B, "hidden_act": "gelu_new"}).activation is Activation.GELU_TANH


def test_frequencies_of_yarn_reach_from_kept_to_divided():
    frequencies = inverse_frequencies(YarnRope(1e6, 4.0, 32768, 32.0, 1.0, 1.0, True), 128)
    plain = inverse_frequencies(DefaultRope(1e6), 128)
    assert frequencies[0] == plain[0]
    assert float(frequencies[-1]) == pytest.approx(float(plain[-1]) / 4)


def test_a_checkpoint_of_older_transformers(tiny_model, tmp_path, edit_config, in_process):
    """``torch_dtype``, ``rope_theta`` and ``rope_scaling`` in their old places give the same model."""
    new = tiny_model("llama-rope-yarn").path
    old = shutil.copytree(new, tmp_path / "old")
    rope = json.loads((new / CONFIG).read_text())["rope_parameters"]
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    edit_config(old, rope_parameters=..., rope_theta=theta, rope_scaling={"type": kind, **rope})
    edit_config(old, dtype=..., torch_dtype="float32")
    assert check_checkpoint(old).spec == check_checkpoint(new).spec


def test_tensors_that_follow_from_others_may_be_there(tiny_model, tmp_path):
    source = tiny_model("qwen2-tied").path
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / CONFIG).write_text((source / CONFIG).read_text())
    assert check_checkpoint(tmp_path).spec.tied_embeddings


def test_dtype_is_that_of_the_weights(tiny_model, tmp_path, edit_config):
    assert check_checkpoint(tiny_model("llama").path).dtype == "float32"
    copy.deepcopy(tiny_model("llama").module).to(torch.bfloat16).save_pretrained(tmp_path)
    edit_config(tmp_path, dtype="float32")
    info = check_checkpoint(tmp_path)
    assert info.dtype == "bfloat16"
    edit_config(tmp_path, dtype="float16")
    assert check_checkpoint(tmp_path, weights=False).dtype == "float16"


def test_the_demo_model_is_found_and_whole():
    info = check_checkpoint(resolve_model(DEMO))
    assert info.dtype == "bfloat16"
    assert 5e6 <= info.spec.num_parameters <= 6e6


def test_a_directory_is_its_own_resolution(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_a_directory_that_is_not_there(name):
    with pytest.raises(ModelError, match="no such directory: give"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "x"))


def test_a_model_id_is_resolved_only_from_the_cache_when_offline(tiny_model, tmp_path, monkeypatch):
    """HF_HUB_OFFLINE is read at import, so this runs in a process of its own."""
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--owner--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    (refs / "v1").write_text("0" * 40)
    for file in tiny_model("llama").path.iterdir():
        (snapshot / file.name).symlink_to(file)
    code = """
import sys
from penstock.models.checkpoint.checkpoint import check_checkpoint, resolve_model
from penstock.models.errors import ModelError
print(check_checkpoint(resolve_model("owner/tiny")).spec.architecture)
print(resolve_model("owner/tiny", revision="v1") == resolve_model("owner/tiny"))
for name, revision in (("owner/absent", None), ("owner/bad name", None), ("owner/tiny", "v2"), ("demo", "v1")):
    try:
        resolve_model(name, revision=revision)
    except ModelError as error:
        print(error)
"""
    env = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "PATH": ""}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    found, same, absent, bad, other, local = done.stdout.splitlines()
    assert found == "LlamaForCausalLM"
    assert absent.startswith("owner/absent: not in the Hugging Face cache")
    assert bad.startswith("owner/bad name: neither a directory nor")
    assert same == "True"
    assert other.startswith("owner/tiny at v2: not in the Hugging Face cache")
    assert local.startswith("--revision v1: demo is not on the hub")
