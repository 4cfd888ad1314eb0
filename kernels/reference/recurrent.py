"""Torch references of the kernels of recurrent layers: one token after another, so that a row's results do not depend
on how it is cut into steps. States are changed in place.

B is the number of rows, T of each row's tokens, C of channels, H of heads, K and V their key and value sizes. All
tensors are in at least fp32.
"""

import torch
from torch import Tensor


def causal_convolution(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y[t, c] = bias[c] + sum_j weight[c, j] z[t + j, c], where z is the last inputs followed by ``x``.

    ``x`` is (B, T, C), ``state`` (B, C, taps - 1): the last inputs; ``weight`` (C, taps), ``bias`` (C,). Returns (B, T,
    C).
    """
    taps = weight.shape[1]
    inputs = torch.cat((state, x.transpose(1, 2)), dim=2)
    state.copy_(inputs[:, :, inputs.shape[2] - taps + 1 :])
    y = inputs[:, :, : x.shape[1]] * weight[:, :1]
    for tap in range(1, taps):
        y = y + inputs[:, :, tap : tap + x.shape[1]] * weight[:, tap : tap + 1]
    y = y.transpose(1, 2)
    return y if bias is None else y + bias


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Computes, token by token, S = a S; S = S + k beta (v - k S); y = q S.

    ``query`` and ``key`` are (B, T, H, K), ``value`` (B, T, H, V), ``decay`` a and ``beta`` (B, T, H), ``state`` S (B,
    H, K, V). Returns (B, T, H, V).
    """
    y = torch.empty_like(value)
    for token in range(value.shape[1]):
        q, k = query[:, token].unsqueeze(-1), key[:, token].unsqueeze(-1)
        state.mul_(decay[:, token, :, None, None])
        error = value[:, token] - (state * k).sum(-2)
        state.add_(k * (error * beta[:, token].unsqueeze(-1)).unsqueeze(-2))
        y[:, token] = (state * q).sum(-2)
    return y


def state_space_scan(value: Tensor, step: Tensor, decay: Tensor, key: Tensor, query: Tensor, state: Tensor) -> Tensor:
    """Computes, token by token, S = a S + k d v; y = q S: the scan of Mamba-2, whose B, x and C are k, v and q.

    ``value`` is (B, T, H, V), ``step`` d and ``decay`` a (B, T, H), ``key`` and ``query`` (B, T, H, K), ``state`` S (B,
    H, K, V). Returns (B, T, H, V).
    """
    y = torch.empty_like(value)
    for token in range(value.shape[1]):
        added = value[:, token] * step[:, token].unsqueeze(-1)
        state.mul_(decay[:, token, :, None, None])
        state.add_(key[:, token].unsqueeze(-1) * added.unsqueeze(-2))
        y[:, token] = (state * query[:, token].unsqueeze(-1)).sum(-2)
    return y
