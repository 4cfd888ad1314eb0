"""The weights of an EAGLE-3 head in torch, and the choice of its drafts: as ``sampler`` chooses tokens, but without
penalties and filters. Nothing here waits for the device."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.reference.sampling import keyed_gumbel
from penstock.kernels.reference.upcast import upcast
from penstock.models.backends.memory import check_weights_fit
from penstock.models.backends.torch_common.loader import FileSource, load_weights
from penstock.models.backends.torch_common.weights import DenseLinear, RmsNorm, Weights
from penstock.models.checkpoint.eagle import FC, HIDDEN_NORM, EagleCheckpoint
from penstock.models.speculative.eagle.head import Draws
from penstock.scheduler.worker_config import WorkerConfig


@dataclass(frozen=True)
class HeadWeights:
    """The weights that a model of one layer has, and the head's other ones."""

    common: Weights
    fc: DenseLinear
    """Maps features to the hidden states that the layer continues from."""
    hidden_norm: RmsNorm
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


class DrawTensors(NamedTuple):
    """``Draws`` on a device."""

    temperatures: Tensor
    """(S,) float64."""
    seeds: Tensor
    """(S,) int64: the same 64 bits."""
    positions: Tensor
    """(S,) int64."""


class Drawn(NamedTuple):
    """The chosen drafts."""

    token_ids: Tensor
    """(S,) int64: ids of the model's vocabulary."""
    probabilities: Tensor
    """(S,), at temperature 1."""
    noise: Tensor
    """(S,) float64; 0 where nothing was drawn."""


def draw_tensors(draws: Draws, device: torch.device) -> DrawTensors:
    """Copies draws to a device."""
    arrays = draws.temperatures, draws.seeds.view("int64"), draws.positions
    return DrawTensors(*(torch.from_numpy(array).to(device) for array in arrays))


def draw_drafts(logits: Tensor, target_ids: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Drawn:
    """Chooses the argmax of the logits over the temperature plus the noise of the model's ids; at temperature 0, of the
    logits only. ``logits`` is (S, V). ``target_ids`` is (V,) int64: the model's ids."""
    logits = upcast(logits)
    is_drawn = temperatures > 0.0
    noise = keyed_gumbel(seeds[:, None], positions[:, None], target_ids)
    noise = torch.where(is_drawn[:, None], noise, 0.0)
    divisors = torch.where(is_drawn, temperatures, 1.0).to(logits.dtype)
    scores = (logits - logits.amax(1, keepdim=True)) / divisors[:, None]
    best = (scores + noise).argmax(1, keepdim=True)
    probabilities = logits.softmax(1).gather(1, best)
    return Drawn(target_ids[best[:, 0]], probabilities[:, 0], noise.gather(1, best)[:, 0])
