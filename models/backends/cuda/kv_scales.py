"""The scales of a KV cache in fp8, which some quantised checkpoints have."""

import numpy as np
import torch
from torch import Tensor

from penstock.models.backends.tensor_parallel import TensorParallel, share
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.quantization.reader import read_floats
from penstock.models.errors import ModelError


def read_kv_scales(info: CheckpointInfo, parallel: TensorParallel, device: torch.device) -> list[Tensor]:
    """Returns the scales of the rank's heads in what each layer attends to, (2, K) in fp32: those of keys, then those
    of values. They are 1 where the checkpoint has none. Raises ModelError if one is not above zero."""
    scales: list[Tensor] = []
    for layer, source in enumerate(info.spec.kv_sources):
        if source != layer:
            scales.append(scales[source])
            continue
        num_heads = info.spec.at(layer).num_kv_heads
        of_layer = np.ones((2, num_heads), dtype=np.float32)
        for of_kind, kind in zip(of_layer, "kv", strict=True):
            name = f"model.layers.{layer}.self_attn.{kind}_scale"
            entry = info.kv_scales.get(name)
            if entry is None:
                continue
            of_kind[:] = read_floats(entry).reshape(-1)
            if not (np.isfinite(of_kind).all() and (of_kind > 0).all()):
                raise ModelError(
                    f"{entry.file}: the scale {name} is not above zero: download the model's weights again, or give "
                    "--kv-cache-dtype auto"
                )
        scales.append(torch.from_numpy(of_layer)[:, share(num_heads, parallel)].contiguous().to(device))
    return scales
