"""The backend for GPUs on Triton's compiler, with a driver that launches nothing: GPUs of other kinds, kernels that are
compiled late, and the number of launches."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from without_gpu.bare_machine import write_sitecustomize

from penstock.models.checkpoint.checkpoint import check_checkpoint

if not find_spec("triton"):
    pytest.skip("needs Triton, which has wheels only for Linux", allow_module_level=True)

from penstock.models.backends.cuda import backend

SUPPORT = Path(__file__).parents[3] / "support"
OLDEST_TRITON = Path(__file__).parents[4] / "build" / "oldest-triton"
ADA = "89", str(99 << 10)

# What a service does: it starts, and runs steps of all kinds. The steps of decoding are counted last.
STEPS = """
import json, sys
from without_gpu.fake_gpu import FakeGpu
gpu = FakeGpu(int(sys.argv[1]), int(sys.argv[2]))
gpu.install()
from penstock.kernels.cuda.core.launch import launches
from penstock.models.backends.base import load_backend
from penstock.models.backends.cuda import backend
from penstock.models.speculative.draft_rows import Drafted
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerConfig

backend.unsupported_reason = lambda config, info: None  # there is no GPU to ask
runner = Runner(load_backend(WorkerConfig(
    model=sys.argv[3], backend="cuda", device="cpu", dtype="bfloat16", max_num_seqs=4, max_model_len=64,
)))
samplings = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1, top_k=5, top_p=0.9, min_p=0.1, logprobs=3),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, bad_words=((1, 2),), logit_bias=((3, 1.0),)),
    SamplingParams(prompt_logprobs=2),
]
rows = [
    AddedRow(
        n, 0, [3] * length, length, 0, list(range(4 * n, 4 * n + 4)), sampling,
        state_slot=n if runner._states else -1, max_drafts=3,
    )
    for n, (length, sampling) in enumerate(zip((1, 5, 20, 33), samplings))
]
prompts = [Chunk(row.row, 0, len(row.token_ids)) for row in rows]
for row, prompt in zip(rows, prompts):
    runner.run(StepPlan(0, [], [row], [], [prompt], []))
runner.run(StepPlan(0, [0, 1, 2, 3], [], [], [], []))
runner.run(StepPlan(0, [], rows, [], prompts, []))
if runner._states:
    plan = StepPlan(0, [], [], [], [], [Decode(0, 1), Decode(1, 3)])
    runner._apply(plan)
    runner._compute(plan, Drafted({1: [3, 3]}), 0)()
for count in (1, 2, 3, 4):
    gpu.launched.clear()
    runner.run(StepPlan(0, [], [], [], [], [Decode(n, 1) for n in range(count)]))
stages = [variant.num_stages - variant._settings["num_stages"] for variant in launches.warmed]
print(json.dumps([launches.late, gpu.launched, max(stages)]))
"""


def run(folder: Path, *arguments: str, packages: Path | None = None) -> Any:
    """What the steps print, with the packages of a machine with a GPU; those in a folder come first. Nothing is in
    Triton's cache."""
    write_sitecustomize(folder)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(map(str, filter(None, (folder, packages, SUPPORT))))
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path}
    command = [sys.executable, "-P", "-c", STEPS, *arguments]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "packages",
    [
        None,
        pytest.param(
            OLDEST_TRITON,
            marks=[
                pytest.mark.soak,
                pytest.mark.skipif(not OLDEST_TRITON.exists(), reason="`make soak` installs it"),
            ],
        ),
    ],
    ids=["installed", "oldest"],
)
def test_a_gpu_with_less_shared_memory_runs_all_that_hopper_runs(packages, tiny_model, tmp_path):
    model = tiny_model("llama-tied-biases-head24")
    late, launched, dropped_stages = run(tmp_path, *ADA, str(model.path), packages=packages)
    assert late == 0, "a kernel was compiled after the warm-up"
    assert dropped_stages > 0, "all kernels fit: this tests nothing"
    layers = model.module.config.num_hidden_layers
    counts = Counter(launched)
    per_layer = {"skinny_gemm_kernel": 4, "_rope_kv": 1, "decode_kernel": 1, "_add_rms_norm": 2}
    for name, count in per_layer.items():
        of_head = 1 if name == "skinny_gemm_kernel" else 0
        assert counts[name] == count * layers + of_head, name
    assert len(launched) <= sum(per_layer.values()) * layers + 20


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["Lfm2Config", "Qwen3_5TextConfig", "NemotronHConfig"])
def test_recurrent_layers_compile_nothing_late(name, build_model, tmp_path):
    layers: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
    launches_of_layer = 1
    if name == "Qwen3_5TextConfig":
        layers = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
        launches_of_layer = 3
    if name == "NemotronHConfig":
        layers = {"layers_block_type": ["mamba", "attention"], "head_dim": 16, "mamba_num_heads": 8}
        launches_of_layer = 3
    changes = {"num_hidden_layers": 2, **layers}
    late, launched, _ = run(tmp_path, *ADA, str(build_model(tmp_path / "model", name, changes).path))
    assert late == 0, "a kernel was compiled after the warm-up"
    counts = Counter(launched)
    assert counts["_convolution"] + counts["_scan"] + counts["_gated_norm"] == launches_of_layer


@pytest.fixture
def gpu_of(monkeypatch):
    """Pretends that there is a GPU of a compute capability."""

    def pretend(capability: int) -> None:
        monkeypatch.setattr(backend, "torch_device", torch.device)
        monkeypatch.setattr(backend, "capability_of", lambda device: capability)

    return pretend


@pytest.mark.parametrize(
    ("capability", "config", "reason"),
    [
        (75, {}, "kernels need a GPU of compute capability 8.0"),
        (80, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 needs a GPU of compute capability 8.9 .* has 8.0: leave"),
        (86, {"quantization": "fp8"}, "--quantization fp8 needs .* has 8.6: give int8 or int4"),
        (80, {"quantization": "int8"}, None),
        (80, {}, None),
        (89, {"kv_cache_dtype": "fp8"}, None),
        (120, {"kv_cache_dtype": "fp8", "quantization": "fp8"}, None),
    ],
)
def test_gpus_that_lack_something_are_refused_by_name(capability, config, reason, tiny_model, worker_config, gpu_of):
    path = tiny_model("qwen3").path
    gpu_of(capability)
    given = worker_config(path, device="cuda", backend="cuda", **config)
    told = backend.unsupported_reason(given, check_checkpoint(path))
    assert told is None if reason is None else re.search(reason, str(told))


@pytest.mark.parametrize(
    ("name", "dtype", "shared_kib", "needed"),
    [
        ("latents", "float32", 99, 104),
        ("latents", "float32", 163, None),
        ("latents", "bfloat16", 99, None),
        ("heads", "float32", 99, 160),
        ("heads", "float32", 163, None),
        ("heads", "bfloat16", 99, None),
    ],
)
def test_wide_heads_in_float32_need_more_shared_memory_than_some_gpus_have(
    name, dtype, shared_kib, needed, tiny_model, worker_config, gpu_of, monkeypatch
):
    path = tiny_model("deepseek-v3" if name == "latents" else "llama").path
    info = check_checkpoint(path)
    if name == "latents":
        assert info.spec.latent is not None
        spec = replace(info.spec, latent=replace(info.spec.latent, kv_lora_rank=512))
    else:
        spec = replace(info.spec, head_dim=512)
    gpu_of(89)
    monkeypatch.setattr(backend, "shared_bytes_of", lambda device: shared_kib << 10)
    config = worker_config(path, device="cuda", backend="cuda", dtype=dtype)
    assert backend.unsupported_reason(config, info) is None
    told = backend.unsupported_reason(config, replace(info, spec=spec))
    if needed is None:
        assert told is None
    else:
        assert told == (
            f"--dtype is float32, here float32, and {name} of 512 dimensions then need {needed} KiB of shared memory, "
            f"of which this GPU has {shared_kib}: give --dtype bfloat16"
        )


def test_fp8_checkpoints_need_a_gpu_that_has_fp8(tiny_model, worker_config, gpu_of):
    path = tiny_model("qwen3").path
    info = check_checkpoint(path)
    linear: Any = SimpleNamespace(scheme=SimpleNamespace(is_float=True, bits=8))
    gpu_of(86)
    told = backend.unsupported_reason(
        worker_config(path, device="cuda", backend="cuda"), replace(info, quantized={"layer": linear})
    )
    assert told == (
        "the checkpoint is quantised to fp8, which needs a GPU of compute capability 8.9 (Ada) or later, and this one "
        "has 8.6"
    )
