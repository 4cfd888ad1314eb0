"""Samples the tokens of a step's lines of logits on the device, and computes their log-probabilities."""

import torch
from torch import Tensor

from penstock.kernels.cuda.accept_drafts import accept
from penstock.kernels.cuda.sampling.logprobs import logprobs, make_logprobs_workspace
from penstock.kernels.cuda.sampling.sample import sample
from penstock.kernels.cuda.sampling.tensors import SamplerShape, make_workspace
from penstock.models.backends.cuda.steps.rows import CudaRows
from penstock.models.backends.cuda.steps.step_io import Size, StepInputs, StepOutputs


class CudaSampler:
    """The sampler's kernels, and their memory for up to ``max_sampled`` lines."""

    def __init__(self, shape: SamplerShape, max_sampled: int, device: torch.device) -> None:
        self._shape = shape
        self._room = make_workspace(shape, max_sampled, device)
        self._logprobs_room = make_logprobs_workspace(shape, max_sampled, device)

    def choose(
        self, size: Size, logits: Tensor, inputs: StepInputs, rows: CudaRows, outputs: StepOutputs, last: Tensor
    ) -> Tensor:
        """Samples from ``logits`` (lines, V). Writes tokens and log-probabilities to the outputs. Returns how many of
        its lines' tokens each sequence keeps, (sequences,) int32, and writes the last of them to ``last``."""
        shape, sampled = self._shape, size.sampled
        lines = inputs.sampled(size, rows.masks)
        token_ids = outputs.part("token_ids", sampled)
        sample(shape, logits, rows.sampler, lines, _first(self._room, sampled), token_ids)
        logprobs(
            shape,
            logits,
            lines.num_lines,
            inputs.part("num_top", sampled),
            token_ids,
            _first(self._logprobs_room, sampled),
            outputs.part("chosen", sampled).view(torch.float32),
            outputs.top_part("top_ids", sampled),
            outputs.top_part("top", sampled).view(torch.float32),
        )
        accepted = outputs.part("accepted", size.sequences)
        accept(
            shape,
            rows.sampler,
            inputs.part("line_starts", size.sequences + 1),
            lines.rows,
            inputs.part("drafts", sampled),
            token_ids,
            accepted,
            last,
        )
        return accepted


def _first(room: dict[str, Tensor], sampled: int) -> dict[str, Tensor]:
    """Returns the part of a room for the first ``sampled`` lines."""
    return {name: tensor[:sampled] for name, tensor in room.items()}
