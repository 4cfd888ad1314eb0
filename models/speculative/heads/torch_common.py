"""The weights of a draft head in torch, and the choice of its drafts: as ``sampler`` chooses tokens, but without
penalties and filters. Nothing here waits for the device."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.reference.sampling import keyed_gumbel
from penstock.kernels.reference.upcast import upcast
from penstock.models.backends.memory import check_weights_fit
from penstock.models.backends.torch_common.loader import load_weights
from penstock.models.backends.torch_common.sources import FileSource
from penstock.models.backends.torch_common.weights import DenseLinear, Linear, RmsNorm, SharedWeights, Weights
from penstock.models.checkpoint.draft_head import FC, HeadCheckpoint
from penstock.models.checkpoint.mtp import EMBEDDING_NORM, MtpSpec
from penstock.models.speculative.heads.head import Draws
from penstock.scheduler.worker_config import WorkerConfig


@dataclass(frozen=True)
class HeadWeights:
    """The weights that a model of one layer has, and the head's other ones."""

    common: Weights
    fc: DenseLinear
    """Maps features, or an embedding and hidden states side by side, to what the layer continues from."""
    embedding_norm: RmsNorm | None
    """The norm of embeddings before ``fc``; None for an EAGLE-3 head."""
    hidden_norm: RmsNorm
    target_ids: Tensor
    """(draft vocabulary,) int64: the model's ids of the head's tokens."""


def load_head_weights(
    config: WorkerConfig, head: HeadCheckpoint, dtype_name: str, embedding: Tensor, output: Linear, num_logits: int
) -> HeadWeights:
    """Loads the weights onto the device and in the dtype of the model's ``embedding``. The head uses that and the
    model's ``output`` head, which has ``num_logits`` rows, where it has none of its own. Raises ModelError."""
    spec, dtype, device = head.spec, embedding.dtype, embedding.device
    check_weights_fit(config, "the draft head", spec.num_parameters * dtype.itemsize, dtype_name)
    shared = SharedWeights(None if spec.has_embedding else embedding, None if spec.has_head else output)
    common = load_weights(head.info, dtype, device, "auto", spec.head_rows, shared=shared)
    source = FileSource(head.info)
    fc = torch.empty(spec.hidden_size, spec.fc_columns, dtype=dtype, device=device)
    source.fill(f"{FC}.weight", fc)

    def norm(name: str) -> RmsNorm:
        weight = torch.empty_like(common.norm.weight)
        source.fill(name, weight)
        return RmsNorm(weight.add_(spec.norm_offset), spec.norm_eps)

    embedding_norm = norm(EMBEDDING_NORM) if isinstance(spec, MtpSpec) else None
    target_ids = torch.from_numpy(head.target_ids if spec.has_head else head.target_ids[:num_logits]).to(device)
    return HeadWeights(common, DenseLinear(fc), embedding_norm, norm(spec.hidden_norm), target_ids)


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
