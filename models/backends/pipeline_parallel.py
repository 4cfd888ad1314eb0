"""Pipeline parallelism: the stages that share a model, each a worker process with some of its layers (Huang et al.,
arXiv 1811.06965).

The first stage has the embedding, the first layers, the last norm and the head. It gets the plans, owns the rows, and
chooses the tokens. The other stages have only layers: for each batch they get its hidden states, positions and blocks,
and return hidden states. So rows, drafts, grammars and sampling are the same as in one process, and no token has to
travel between stages. No sum is regrouped, so all results have the same bits as in one process, if the kernels of a
backend give a token the same bits in every batch.

Hidden states go through the first stage, by one connection to each of the others (``stage_link``). Between a stage's
layers and the next one's, a batch waits for the network, so the scheduler keeps one batch per stage in flight
(``scheduler/planning/preemption.py``). Imports no tensor library.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

from penstock.models.architecture.spec import ModelSpec
from penstock.models.errors import ModelError

ROWS, PROMPT_TOKENS = 16, 32
"""The step for which all stages should take the same time: decoding rows, and tokens of prompts. Reading the weights
takes most of a step without prompts, and multiplying most of a step with a long one. This one is in between: as many
rows need it if their outputs are half as long as their prompts."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that one process has."""

    layers: range
    has_ends: bool = True
    """Whether it has the embedding, the last norm and the head."""

    @classmethod
    def whole(cls, spec: ModelSpec) -> "ModelPart":
        """Returns the part that is everything."""
        return cls(range(spec.num_layers))

    @classmethod
    def of_stage(cls, stage: int, layers: Sequence[int]) -> "ModelPart":
        """Returns a stage's part. ``layers`` are the numbers of layers of all stages."""
        end = sum(layers[: stage + 1])
        return cls(range(end - layers[stage], end), has_ends=stage == 0)

    def has(self, tensor: str) -> bool:
        """Whether it has a tensor of ``ModelSpec.tensors``."""
        layer = _LAYER.match(tensor)
        return self.has_ends if layer is None else int(layer[1]) in self.layers


class StageSpeed(msgspec.Struct, frozen=True):
    """What a stage's threads do at best in a second, as measured."""

    bytes_read: float
    operations: float


class PartWork(msgspec.Struct, frozen=True):
    """What a step does with a layer, or with the head."""

    num_bytes: float
    """The bytes of its weights."""
    num_parameters: float
    """The weights that one token is multiplied by."""

    def seconds(self, speed: StageSpeed, num_tokens: int) -> float:
        """Returns about how long it takes: reading the weights, then multiplying what is left to multiply."""
        return max(self.num_bytes / speed.bytes_read, 2 * ROWS * self.num_parameters / speed.operations) + (
            2 * num_tokens * self.num_parameters / speed.operations
        )


def check_stages(spec: ModelSpec, num_stages: int) -> None:
    """Raises ModelError if a model cannot be divided into this many stages."""
    flag = f"--pipeline-parallel-size {num_stages}"
    if num_stages > spec.num_layers:
        raise ModelError(f"{flag}: the model has {spec.num_layers} layers, and each stage needs one: give fewer")
    if num_stages > 1 and spec.layer_inputs is not None:
        raise ModelError(
            f"{flag}: every layer of {spec.architecture} has inputs of its own, which only the first stage could "
            "compute: leave it out"
        )
    if num_stages > 1 and spec.has_state:
        raise ModelError(f"{flag}: the recurrent states of {spec.architecture} need one process: leave it out")
    if num_stages > 1 and not all(spec.has_kv(layer) for layer in range(spec.num_layers)):
        raise ModelError(
            f"{flag}: layers of {spec.architecture} read the keys and values of other layers, which would be in "
            "another stage: leave it out"
        )


def work_of(spec: ModelSpec, num_bytes: Sequence[float]) -> list[PartWork]:
    """Returns the work of each layer. ``num_bytes``: the bytes of the layers' weights."""
    parameters = [0.0] * spec.num_layers
    for name, shape in spec.tensors():
        if (layer := _LAYER.match(name)) is None or len(shape) < 2:
            continue
        share = 1.0
        if spec.experts is not None and ".experts." in name:
            share = spec.experts.per_token / spec.experts.num_experts
        parameters[int(layer[1])] += share * shape[0] * shape[1]
    return [PartWork(size, number) for size, number in zip(num_bytes, parameters, strict=True)]


def divide_layers(layers: Sequence[PartWork], head: PartWork, speeds: Sequence[StageSpeed]) -> tuple[int, ...]:
    """Returns how many layers each stage gets, at least one, so that the slowest stage of a step is as fast as
    possible. The head is in the first stage, and computes only rows whose next token is wanted."""
    starts = [[0.0, *accumulate(layer.seconds(speed, PROMPT_TOKENS) for layer in layers)] for speed in speeds]
    num_layers, num_stages = len(layers), len(speeds)
    # best[i]: the time of the slowest of the stages so far, which have the first i layers, and where each begins.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage, start in enumerate(starts):
        head_s = head.seconds(speeds[0], 0) if stage == 0 else 0.0
        room = range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
        best = {
            end: min(
                (max(slowest, start[end] - start[begin] + head_s), (*ends, end))
                for begin, (slowest, ends) in best.items()
                if begin < end
            )
            for end in room
        }
    _, ends = best[num_layers]
    return tuple(end - begin for begin, end in pairwise(ends))
