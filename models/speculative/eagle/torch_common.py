"""Chooses drafts from a head's logits, in torch, as ``sampler`` chooses tokens without penalties and filters. Nothing
here waits for the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.reference.sampling import keyed_gumbel
from penstock.kernels.reference.upcast import upcast
from penstock.models.speculative.eagle.head import Draws


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
    seeds = torch.from_numpy(draws.seeds.view("int64"))
    return DrawTensors(
        torch.from_numpy(draws.temperatures).to(device), seeds.to(device), torch.from_numpy(draws.positions).to(device)
    )


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
