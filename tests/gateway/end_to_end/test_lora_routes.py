"""LoRA adapters of a real service over HTTP, with vLLM's routes, and on the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.models.checkpoint.checkpoint import DEMO, check_checkpoint, resolve_model
from penstock.models.checkpoint.lora.adapter import MODULES, adapted_linears

PENSTOCK = Path(sys.executable).with_name("penstock")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter for the demo model that changes what it says."""
    path = tmp_path_factory.mktemp("adapter")
    generator = np.random.default_rng(1)
    tensors = {}
    for linear, (rows, columns) in adapted_linears(check_checkpoint(resolve_model(DEMO)).spec).items():
        part = "self_attn" if linear.module in MODULES[:4] else "mlp"
        prefix = f"base_model.model.model.layers.{linear.layer}.{part}.{linear.module}.lora_"
        tensors[f"{prefix}A.weight"] = generator.standard_normal((8, columns), dtype=np.float32)
        tensors[f"{prefix}B.weight"] = generator.standard_normal((rows, 8), dtype=np.float32)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 1}))
    return path


@pytest.fixture(scope="module")
def served(start_serving, adapter):
    flags = (f"--lora-modules=first={adapter}", "--max-loras=2", "--max-lora-rank=8", "--enable-lora-routes")
    with start_serving("--dtype=float32", "--max-model-len=512", *flags) as served:
        yield served


@pytest.fixture
def client(served):
    with httpx.Client(base_url=served.openai, timeout=120) as client:
        yield client


def say(client, model):
    body = {"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    answer = client.post("/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def test_adapters_are_loaded_used_and_unloaded(client, adapter):
    loaded = client.post("/load_lora_adapter", json={"lora_name": "second", "lora_path": str(adapter)})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    cards = {card["id"]: card["parent"] for card in client.get("/models").json()["data"]}
    assert cards == {"demo": None, "first": "demo", "second": "demo"}
    assert client.get("/models/second").json()["parent"] == "demo"
    base, first, second = (say(client, model) for model in ("demo", "first", "second"))
    assert first == second != base
    assert say(client, "demo") == base
    unloaded = client.post("/unload_lora_adapter", json={"lora_name": "second"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
    missing = client.post("/completions", json={"model": "second", "prompt": "x"})
    assert missing.status_code == 404
    assert "demo, first" in missing.json()["error"]["message"]
    assert client.post("/unload_lora_adapter", json={"lora_name": "second"}).status_code == 404


def test_what_cannot_be_loaded_names_the_field(client, tmp_path):
    answer = client.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": str(tmp_path / "nowhere")})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "lora_path"
    assert "no such directory" in error["message"]


def test_on_the_command_line(served, adapter):
    admin = re.search(r"admin listener on (\S+):\n", served.greeting)
    assert admin is not None, served.greeting

    def run(*arguments):
        command = [str(PENSTOCK), "adapters", "--admin", admin[1], *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("--load", "third", str(adapter)).stdout == "third is loaded, rank 8\n"
    assert [each["name"] for each in json.loads(run("--json").stdout)] == ["first", "third"]
    assert re.search(rf"^first +8 +1 +0 +{re.escape(str(adapter))}$", run().stdout, re.MULTILINE)
    assert run("--unload", "third").stdout == "third is unloaded\n"
    failed = run("--load", "third", "relative")
    assert failed.returncode
    assert "must be an absolute path" in failed.stderr


def test_without_the_flag_the_routes_are_not_there(demo):
    for route in ("load", "unload"):
        assert httpx.post(f"{demo.openai}/{route}_lora_adapter", json={}, timeout=120).status_code == 404
    answer = httpx.post(f"{demo.openai}/completions", json={"model": "first", "prompt": "x"}, timeout=120)
    assert answer.status_code == 404
