"""The mixtures of experts of a model's layers, on the kernels or by torch's ``grouped_mm``."""

import logging
import math
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.cuda.core.capture import seconds_on_gpu
from penstock.kernels.cuda.model_shapes import ModelShape
from penstock.kernels.cuda.moe.fused_moe import ExpertsWeights, ExpertsWorkspace, fused_moe
from penstock.kernels.cuda.moe.grouped_mm import MEASURED_TOKENS, grouped_moe, grouped_moe_bytes, has_grouped_mm
from penstock.kernels.cuda.moe.shapes import ExpertsShape
from penstock.models.architecture.spec_parts import Experts
from penstock.models.backends.cuda.product_choice import SecondsOf
from penstock.models.backends.tensor_parallel import ALONE, TensorParallel
from penstock.models.backends.torch_common.weights import ExpertMlp, LayerWeights, MlpBesideExperts

logger = logging.getLogger(__name__)

MAX_SHARE = 1 / 4
"""The share of the free memory that ``grouped_mm`` may take: the rest is for graphs."""


class ExpertLayers:
    """The experts of all layers, which have the same sizes and share a workspace."""

    def __init__(
        self, spec: Experts, shape: ModelShape, layers: tuple[LayerWeights, ...], device: torch.device
    ) -> None:
        """Multiplies the experts' outputs by their factors, in the weights: the kernels do not have them."""
        self._spec = spec
        self._shape = ExpertsShape.of(shape)
        self._room = ExpertsWorkspace.allocate(self._shape, shape.max_tokens, device)
        self._min_grouped_tokens = math.inf
        mlps = [layer.mlp.experts if isinstance(layer.mlp, MlpBesideExperts) else layer.mlp for layer in layers]
        self._mlps = [mlp for mlp in mlps if isinstance(mlp, ExpertMlp)]
        for layer in layers:
            if isinstance(layer.mlp, MlpBesideExperts) and layer.mlp.experts.scales is not None:
                # In place: the KV cache is allocated by now, and a copy in fp32 may not fit beside it.
                layer.mlp.experts.down.mul_(layer.mlp.experts.scales[:, None, None])

    def changes(self) -> list[int]:
        """Returns the numbers of tokens from which other kernels run."""
        return self._shape.changes()

    def measure(
        self, max_tokens: int, seconds_of: SecondsOf = seconds_on_gpu, parallel: TensorParallel = ALONE
    ) -> None:
        """Measures from how many tokens on torch multiplies faster than the kernels. All ranks of a model call this
        together, and choose the same."""
        found = math.inf
        counts = [tokens for tokens in reversed(MEASURED_TOKENS) if tokens <= max_tokens]
        for tokens in counts if self._can_use_torch(max_tokens) else []:
            if not self._is_faster(tokens, seconds_of):
                break
            found = tokens
        never = 1 + max_tokens
        agreed = -parallel.least(-int(min(found, never)))
        if agreed < never:
            self._min_grouped_tokens = agreed
            logger.info("experts: torch's grouped_mm multiplies %s tokens and more, which was faster here", agreed)

    def _can_use_torch(self, max_tokens: int) -> bool:
        """Whether torch can compute steps of up to ``max_tokens``."""
        device = self._room.parts.device
        if not self._mlps or not has_grouped_mm(self._shape, device):
            return False
        if grouped_moe_bytes(self._shape, max_tokens) <= MAX_SHARE * free_bytes(device):
            return True
        logger.info("experts: torch's grouped_mm is not used, since it needs more memory for %s tokens", max_tokens)
        return False

    def _is_faster(self, tokens: int, seconds_of: SecondsOf) -> bool:
        shape, weights = self._shape, _kernel_weights(self._mlps[0])
        x = torch.randn(tokens, shape.hidden_size, dtype=shape.dtype, device=weights.down.device)
        logits = torch.randn(tokens, shape.mixture.num_experts, dtype=shape.logits_dtype, device=x.device)
        query_starts = torch.full((2,), tokens, dtype=torch.int32, device=x.device)
        query_starts[0] = 0
        arguments = (shape, x, logits, weights, query_starts, self._room, torch.empty_like(x))
        kernels_s = seconds_of(partial(fused_moe, *arguments))
        try:
            torch_s = seconds_of(partial(grouped_moe, *arguments))
        except (RuntimeError, ValueError) as error:
            logger.info("the kernels multiply by experts of %s tokens, since grouped_mm cannot: %s", tokens, error)
            return False
        return torch_s < kernels_s

    def compute(self, mlp: ExpertMlp, x: Tensor, query_starts: Tensor, routed_by: Tensor | None = None) -> Tensor:
        """(T, hidden) -> (T, hidden). ``routed_by`` is the input of the router, if it is not that of the experts."""
        out = torch.zeros_like(x)  # tokens without a sequence get nothing
        logits, factor = self._route(mlp, x if routed_by is None else routed_by)
        inputs = x if factor is None or not mlp.scales_inputs else x * factor
        product = grouped_moe if len(x) >= self._min_grouped_tokens else fused_moe
        product(self._shape, inputs, logits, _kernel_weights(mlp), query_starts, self._room, out)
        if factor is not None and not mlp.scales_inputs:
            out *= factor
        return mlp.add_shared(x, out)

    def _route(self, mlp: ExpertMlp, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns logits (T, E) whose softmax over the largest ones is that of the experts' factors, and what the
        experts' sum, or their input, has to be multiplied by."""
        logits: Tensor = mlp.router(x)
        if self._spec.is_plain_softmax:
            return logits, None
        chosen, factors = mlp.choose(logits)
        total = factors.sum(-1, keepdim=True)
        least = torch.finfo(logits.dtype).min
        # Sigmoids may all be zero.
        tiny = torch.finfo(factors.dtype).tiny
        shares = (factors / total.clamp(min=tiny)).clamp(min=tiny).log()
        routed = torch.full_like(logits, least).scatter_(-1, chosen, shares.to(logits.dtype))
        return routed, total.to(x.dtype)


def free_bytes(device: torch.device) -> float:
    """Returns the free memory of a GPU; without one, infinity."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def _kernel_weights(mlp: ExpertMlp) -> ExpertsWeights:
    return ExpertsWeights(
        mlp.gate_up, mlp.down, mlp.gate_up_bias, mlp.down_bias, mlp.gate_up_exponents, mlp.down_exponents
    )
