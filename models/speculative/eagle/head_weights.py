"""The weights of an EAGLE-3 head in torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.models.backends.memory import check_weights_fit
from penstock.models.backends.torch_common.loader import FileSource, load_weights
from penstock.models.backends.torch_common.weights import DenseLinear, RmsNorm, Weights
from penstock.models.checkpoint.eagle import FC, HIDDEN_NORM, EagleCheckpoint
from penstock.scheduler.plan import WorkerConfig


@dataclass(frozen=True)
class HeadWeights:
    """The weights that a model of one layer has, and the head's other ones."""

    common: Weights
    fc: DenseLinear
    """Maps features to the hidden states that the layer continues from."""
    hidden_norm: RmsNorm
    """The norm of those hidden states."""
    target_ids: Tensor
    """(draft vocabulary,) int64: the model's ids of the head's tokens."""


def load_head_weights(config: WorkerConfig, head: EagleCheckpoint, dtype_name: str, embedding: Tensor) -> HeadWeights:
    """Loads the weights onto the device and in the dtype of the model's ``embedding``, which the head uses if it has
    none of its own. Raises ModelError."""
    spec, dtype, device = head.spec, embedding.dtype, embedding.device
    check_weights_fit(config, "the EAGLE-3 head", spec.num_parameters * dtype.itemsize, dtype_name)
    shared = None if spec.has_embedding else embedding
    common = load_weights(head.info, dtype, device, "auto", spec.head_rows, embedding=shared)
    source = FileSource(head.info)
    fc = torch.empty(spec.hidden_size, spec.fc_columns, dtype=dtype, device=device)
    source.fill(f"{FC}.weight", fc)
    norm = torch.empty_like(common.norm.weight)
    source.fill(HIDDEN_NORM, norm)
    target_ids = torch.from_numpy(head.target_ids).to(device)
    return HeadWeights(common, DenseLinear(fc), RmsNorm(norm, spec.norm_eps), target_ids)
