"""What hybrids are by their configs, what their states take, and what is refused with them."""

import json
import shutil
from dataclasses import replace

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.models.architecture.recurrent import GatedDeltaNet, ShortConvolution
from penstock.models.architecture.registry import spec_from_config
from penstock.models.backends import base
from penstock.models.backends.base import load_backend
from penstock.models.backends.memory import CacheSizes, cache_sizes
from penstock.models.checkpoint.checkpoint import SINGLE, check_checkpoint
from penstock.models.checkpoint.quantization.config import quantization_from_config
from penstock.models.errors import ModelError
from penstock.models.speculative.draft_model import load as load_draft_model
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig, WorkerConfig

# As published: the fields of these models' config.json that matter here.
LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
    "norm_eps": 1e-05, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "vocab_size": 65536,
}  # fmt: skip
QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip

NEMOTRON_3 = {
    "architectures": ["NemotronHForCausalLM"], "hidden_size": 64, "hybrid_override_pattern": "ME*E",
    "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 160,
}  # fmt: skip
FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "mamba_d_ssm": 80, "mamba_n_heads": 8, "mamba_d_state": 16, "vocab_size": 160,
}  # fmt: skip


def test_published_configs():
    lfm2 = spec_from_config(LFM2_1_2B)
    assert lfm2.num_parameters == 1_170_340_608
    assert lfm2.recurrent[:3] == (ShortConvolution(2048, 3, False),) * 2 + (None,)
    assert sum(mixer is None for mixer in lfm2.recurrent) == 6
    assert 4 * lfm2.state_floats == 160 << 10
    assert lfm2.kv_bytes_per_token(2) == 12 << 10
    qwen = spec_from_config(QWEN3_NEXT_80B)
    assert qwen.recurrent[2:4] == (GatedDeltaNet(16, 32, 128, 128, 4, 1e-6), None)
    assert (qwen.rotary_dim, qwen.norm_offset, qwen.gated_attention) == (64, 1.0, True)
    assert 75 << 20 < 4 * qwen.state_floats < 76 << 20
    assert qwen.kv_bytes_per_token(2) == 24 << 10


def test_qwen3_5_beside_a_vision_tower_and_a_drafter(hybrid, tmp_path):
    """As published. Only the language model is read; the drafter is not counted."""
    plain = hybrid("qwen3.5").path
    path = shutil.copytree(plain, tmp_path / "whole")
    tensors = {
        name.replace("language_model.", "").replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(plain / SINGLE).items()
    }
    others = {name: torch.zeros(2, 2) for name in ("mtp.fc.weight", "model.visual.merger.weight")}
    save_file({**tensors, **others}, path / SINGLE)
    config = json.loads((path / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": config}
    (path / "config.json").write_text(json.dumps(whole))
    info = check_checkpoint(path)
    assert info.spec == check_checkpoint(plain).spec
    assert "1 tensors of its other parts are not loaded" in info.warnings[0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**LFM2_1_2B, "full_attn_idxs": []}, "layer_types is None: it must leave a layer with full_attention"),
        ({**LFM2_1_2B, "layer_types": ["mamba"] * 16}, "mamba is not supported"),
        ({**LFM2_1_2B, "conv_L_cache": 1}, "conv_L_cache is 1: it must be an integer from 2"),
        ({**QWEN3_NEXT_80B, "linear_num_value_heads": 24}, "must be a multiple of linear_num_key_heads, 16"),
        ({**QWEN3_NEXT_80B, "full_attention_interval": 64}, "must leave a layer with full_attention"),
        ({**QWEN3_NEXT_80B, "hidden_act": "gelu"}, "must be silu"),
        ({**NEMOTRON_3, "moe_latent_size": 32}, "moe_latent_size is 32: it must be null"),
        ({**NEMOTRON_3, "mlp_bias": True}, "mlp_bias is True: it must be false"),
        ({**NEMOTRON_3, "hybrid_override_pattern": "MEX*"}, "must have only Mamba-2, attention, MLPs and experts"),
        ({**FALCON_H1, "mamba_d_ssm": 100}, "mamba_n_heads is 8: it must divide 100"),
        ({**FALCON_H1, "mamba_rms_norm": True}, "mamba_norm_before_gate .* must be false"),
        ({**FALCON_H1, "projectors_bias": True}, "must be the same as mamba_proj_bias"),
        ({**FALCON_H1, "ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers"),
    ],
)
def test_configs_that_are_refused(config, says):
    with pytest.raises(ModelError, match=says):
        spec_from_config(config)


def sizes(state_kib, max_model_len=None, **config):
    """With blocks of 1 KiB."""
    worker = WorkerConfig("", max_model_len=max_model_len, **config)
    return cache_sizes(worker, 1 << 10, state_kib << 10, max_model_len or 4096)


def test_memory_is_divided_between_blocks_and_states():
    # Without recurrent layers, all of it is for blocks.
    assert sizes(0, kv_cache_bytes=1 << 20) == CacheSizes(1024, 0)
    # A slot for each row, and one for 1,024 tokens of KV: (1024 - 8 * 1) / (1 + 64) = 15.
    assert sizes(1, kv_cache_bytes=1 << 20, max_num_seqs=8) == CacheSizes(1024 - 23, 23)
    # No more than half of the budget is for states, and as many rows run as have one.
    assert sizes(64, kv_cache_bytes=1 << 20, max_num_seqs=256) == CacheSizes(512, 8)
    # Less than half if the longest request needs the blocks.
    assert sizes(100, 14000, kv_cache_bytes=1 << 20) == CacheSizes(924, 1)
    assert sizes(1, num_blocks=128, max_num_seqs=8) == CacheSizes(128, 10)


def test_memory_for_less_than_one_row_is_refused():
    with pytest.raises(ModelError, match=r"one request of 1024 tokens needs 0.16 MiB: raise --kv-cache-memory-bytes"):
        sizes(100, kv_cache_bytes=150 << 10)


def test_fewer_rows_run_than_the_flag_says(hybrid, worker_config, caplog):
    model = hybrid("lfm2")
    config = worker_config(model.path, kv_cache_bytes=1 << 20, max_num_seqs=4096, max_model_len=64)
    facts = load_backend(config).facts
    assert facts.max_num_seqs == facts.num_state_slots < 4096
    assert facts.num_state_slots * facts.state_bytes <= 1 << 19
    assert "recurrent states" in caplog.text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tensor_parallel_size": 2}, "leave --tensor-parallel-size 2 out"),
        ({"pipeline_parallel_size": 2, "backend": "cpu"}, "leave --pipeline-parallel-size 2 out"),
        (
            {"pipeline_parallel_size": 2, "backend": "reference"},
            "leave --pipeline-parallel-size 2 out: Lfm2.* recurrent",
        ),
        ({"speculation": SpeculationConfig(DraftMethod.EAGLE3, 3, model="x")}, "another method than eagle3"),
        (
            {"backend": "transformers"},
            "has recurrent layers, which this backend does not run: give --backend cpu or cuda or reference",
        ),
    ],
)
def test_what_does_not_work_with_states_is_refused(hybrid, worker_config, changes, says):
    config = msgspec.structs.replace(worker_config(hybrid("lfm2").path), **changes)
    with pytest.raises(ModelError, match=says):
        load_backend(config)


def test_a_quantised_checkpoint_is_refused(hybrid, worker_config, monkeypatch):
    path = hybrid("lfm2").path
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    info = replace(check_checkpoint(path), quantization=quantization_from_config({"quantization_config": scheme}))
    monkeypatch.setattr(base, "check_checkpoint", lambda *_, **__: info)
    with pytest.raises(ModelError, match="use the unquantised checkpoint"):
        load_backend(worker_config(path))


def test_a_draft_model_with_states_is_refused(hybrid, tiny_model, worker_config):
    speculation = SpeculationConfig(DraftMethod.DRAFT_MODEL, 3, model=str(hybrid("lfm2").path))
    config = worker_config(tiny_model("llama").path, speculation=speculation)
    with pytest.raises(ModelError, match="has recurrent layers"):
        load_draft_model(config, load_backend(config))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
def test_dummy_weights(hybrid, rows, backend, name, prompt, request):
    if backend == "cpu":
        request.getfixturevalue("cpu_library")
    play = rows(hybrid(name).path, backend=backend, load_format="dummy")
    result = play.begin(play.row(0, prompt, slot=0))
    assert len(result.token_ids) == 1
