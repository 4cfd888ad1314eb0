"""The wide model computes what the demo model computes, whatever its additional weights are."""

from pathlib import Path

import torch
import transformers
from spec_bench.widen import Sizes, widen

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model


def test_the_wide_model_is_the_same_function(tmp_path: Path) -> None:
    num_bytes = widen(tmp_path / "wide", Sizes(num_hidden_layers=8, intermediate_size=1000))
    ids = torch.randint(0, 4096, (1, 60), generator=torch.Generator().manual_seed(1))
    logits = []
    for folder in (resolve_model(DEMO), tmp_path / "wide"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits.append(model(ids).logits)
    assert num_bytes > (resolve_model(DEMO) / "model.safetensors").stat().st_size
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
