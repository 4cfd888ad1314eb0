"""Chooses the tokens of a step's lines of logits on the device, and finds their log-probabilities."""

from typing import TypeVar

import torch
from torch import Tensor

from penstock.kernels.cuda.accept_drafts import accept
from penstock.kernels.cuda.sampling.logprobs import LogprobsRoom, logprobs, make_logprobs_room
from penstock.kernels.cuda.sampling.sample import sample
from penstock.kernels.cuda.sampling.tensors import SamplerRoom, SamplerShape, make_room
from penstock.models.backends.cuda.rows import CudaRows
from penstock.models.backends.cuda.step_io import Size, StepInputs, StepOutputs

Room = TypeVar("Room", SamplerRoom, LogprobsRoom)


class CudaSampler:
    """The sampler's kernels, and the memory that they need for up to so many lines."""

    def __init__(self, shape: SamplerShape, max_lines: int, device: torch.device) -> None:
        self._shape = shape
        self._room = make_room(shape, max_lines, device)
        self._logprobs_room = make_logprobs_room(shape, max_lines, device)

    def choose(
        self, size: Size, logits: Tensor, inputs: StepInputs, rows: CudaRows, outputs: StepOutputs, last: Tensor
    ) -> Tensor:
        """``logits`` is (lines, V). Tokens and log-probabilities go to the outputs. Returns how many of its lines'
        tokens each sequence keeps, (sequences,) int32, and writes the last of them to ``last``."""
        shape, lines = self._shape, size.lines
        told = inputs.lines(size, rows.masks)
        token_ids = outputs.part("token_ids", lines)
        sample(shape, logits, rows.sampler, told, _first(self._room, lines), token_ids)
        logprobs(
            shape,
            logits,
            told.num_lines,
            inputs.part("num_top", lines),
            token_ids,
            _first(self._logprobs_room, lines),
            outputs.part("chosen", lines).view(torch.float32),
            outputs.top_part("top_ids", lines),
            outputs.top_part("top", lines).view(torch.float32),
        )
        accepted = outputs.part("accepted", size.sequences)
        accept(
            shape,
            rows.sampler,
            inputs.part("line_starts", size.sequences + 1),
            told.rows,
            inputs.part("drafts", lines),
            token_ids,
            accepted,
            last,
        )
        return accepted


def _first(room: Room, lines: int) -> Room:
    """The part of a room for so many lines."""
    return type(room)(**{name: tensor[:lines] for name, tensor in vars(room).items()})
