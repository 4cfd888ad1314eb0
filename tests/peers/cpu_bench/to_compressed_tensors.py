"""Quantises one of our models with compressed-tensors, as vLLM reads it: to_compressed_tensors.py PRESET MODEL OUT.

PRESET is W8A8 (int8, a scale a row; activations are quantised as vLLM runs) or W4A16 (int4 in groups of 128). Weights
are rounded to the nearest value, without calibration, which would not change how fast they are. The head stays bf16, as
in the checkpoints that llm-compressor makes by default. Runs in vLLM's environment.
"""

import sys
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Writes the checkpoint."""
    preset, source, out = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "quantization_scheme"):
                _set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def _set_scales(module: Any) -> None:
    weights = module.quantization_scheme.weights
    weight = module.weight.float()
    groups = weight.unflatten(1, (-1, weights.group_size or weight.shape[1]))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
    module.weight_scale.copy_(scale)


if __name__ == "__main__":
    main()
