"""The parts of a model in stages for backends in torch. Hidden states travel in the model's dtype, as they are between
layers; those of a GPU go through pinned host memory. A rank's speed is measured, so that the layers can be divided."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.pipeline_parallel import ModelPart, PartWork, StageSpeed, work_of
from penstock.models.backends.stage_part import Bytes, Hidden, StageRows
from penstock.models.backends.torch_common.device import copy_to
from penstock.models.backends.torch_common.outputs import result_of, wanted_tokens
from penstock.models.batch.batch import Batch, BatchResult
from penstock.models.batch.grammar_matcher import Words
from penstock.models.batch.rows import Ids
from penstock.models.batch.sampled_positions import GrammarBitmasks
from penstock.scheduler.worker_config import WorkerFacts

COLUMNS = 1024
LEAST_BYTES, MOST_BYTES = 4 << 20, 256 << 20
"""The limits of the memory that is read: a small model's weights may fit into caches."""
ROWS, TOKENS = 1024, 64
"""The shape of the product whose operations are counted."""
SECONDS = 0.3
"""How long each is repeated."""


class StageDecoder(Protocol):
    """The layers that a rank has, and rank 0's ends."""

    @property
    def facts(self) -> WorkerFacts:
        """The properties of the rank's part of the model."""

    def reset_blocks(self, block_ids: list[int]) -> None:
        """See ``Backend``."""

    def embed(self, batch: Batch) -> Tensor:
        """Returns the input of the first layer, (T, hidden)."""

    def run_layers(self, rows: Batch | StageRows, x: Tensor) -> Tensor:
        """(T, hidden) -> (T, hidden), between layers. Writes the KV of every token. May overwrite ``x``."""

    def final_norm(self, x: Tensor) -> Tensor:
        """(N, hidden) -> (N, hidden). May overwrite ``x``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, hidden) after the last norm -> (N, tokenizer's vocabulary), in at least fp32."""


class TorchPart:
    """A ``FirstPart`` and a ``LayerPart`` over a backend's layers."""

    def __init__(self, decoder: StageDecoder, dtype: torch.dtype, device: torch.device) -> None:
        self.facts = decoder.facts
        self.token_bytes = decoder.facts.hidden_size * dtype.itemsize
        self.decoder = decoder
        self._dtype = dtype
        self._device = device

    def prefault(self) -> None:
        """Does nothing: torch's allocator manages memory."""

    def reset_blocks(self, block_ids: list[int]) -> None:
        self.decoder.reset_blocks(block_ids)

    def head_of(self, batch: Batch) -> "_TorchHead":
        return _TorchHead(self, batch)

    @torch.inference_mode()
    def begin(self, batch: Batch, tables: Ids, share: Callable[[Hidden], None] | None) -> Hidden:
        x = self.decoder.embed(batch)
        if share is not None:
            share(self._to_host(x))
        return self._to_host(self.decoder.run_layers(batch, x))

    @torch.inference_mode()
    def compute(self, rows: StageRows, hidden: Bytes, wanted: Ids | None) -> Hidden:
        self.decoder.reset_blocks(rows.fresh_blocks())
        x = self.decoder.run_layers(rows, self.to_device(hidden))
        return self._to_host(x if wanted is None else x[copy_to(self._device, wanted)])

    def to_device(self, hidden: Bytes) -> Tensor:
        """Returns the hidden states, (N, hidden)."""
        return copy_to(self._device, hidden).view(self._dtype).view(-1, self.facts.hidden_size)

    def _to_host(self, x: Tensor) -> Hidden:
        if x.is_cuda:
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            x = host.copy_(x)  # waits
        return np.asarray(x.contiguous().view(torch.uint8).numpy())


class _KnownWords(NamedTuple):
    """Masks that were awaited. See ``MaskWords``."""

    words: Words

    def result(self) -> Words:
        return self.words


class _TorchHead:
    """A ``BatchHead``."""

    def __init__(self, part: TorchPart, batch: Batch) -> None:
        self._part = part
        self._batch = batch
        self.wanted = wanted_tokens(batch)

    def await_masks(self) -> None:
        masks = self._batch.masks
        assert masks is not None, "there are some"
        known = GrammarBitmasks(masks.sampled, _KnownWords(masks.words.result()), masks.late)
        self._batch = replace(self._batch, masks=known)

    @torch.inference_mode()
    def finish(self, hidden: Bytes) -> BatchResult:
        if not len(self.wanted):
            return BatchResult([], [])
        decoder = self._part.decoder
        states = decoder.final_norm(self._part.to_device(hidden))
        # ``result_of`` names tokens by their index in the batch.
        of_batch = states.new_zeros(len(self._batch.token_ids), states.shape[1])
        of_batch[copy_to(states.device, self.wanted)] = states
        return result_of(self._batch, of_batch, decoder.logits, decoder.facts.vocab_size)


def rank_work(
    spec: ModelSpec, num_logits: int, itemsize: int, bytes_of: Callable[[ModelPart], float]
) -> tuple[list[PartWork], PartWork]:
    """Implements ``StageLoading.work``. ``itemsize`` is that of the head's weights; ``bytes_of`` returns the bytes of a
    part's."""
    layers = [bytes_of(ModelPart(range(layer, layer + 1), has_ends=False)) for layer in range(spec.num_layers)]
    head = num_logits * spec.hidden_size
    return work_of(spec, layers), PartWork(float(itemsize * head), head)


def num_loaded(spec: ModelSpec, num_logits: int, part: ModelPart) -> int:
    """Returns the number of parameters of a rank's part of a model in stages. ``spec`` is the rank's."""
    unloaded = spec.vocab_size - num_logits if part.has_ends and not spec.tied_embeddings else 0
    return sum(math.prod(shape) for name, shape in spec.tensors() if part.has(name)) - unloaded * spec.hidden_size


@torch.inference_mode()
def measure_rank_speed(dtype: torch.dtype, device: torch.device, weight_bytes: int) -> StageSpeed:
    """Multiplies by one row, for the bytes that are read, and by many, for the operations. ``weight_bytes`` are those
    of the model."""
    num_bytes = min(MOST_BYTES, max(LEAST_BYTES, weight_bytes))
    read = torch.ones(max(ROWS, num_bytes // (COLUMNS * dtype.itemsize)), COLUMNS, dtype=dtype, device=device)
    multiplied = read[:ROWS]
    one, many = (torch.ones(count, COLUMNS, dtype=dtype, device=device) for count in (1, TOKENS))
    read_s = _best(lambda: functional.linear(one, read), device)
    multiply_s = _best(lambda: functional.linear(many, multiplied), device)
    return StageSpeed(read.nbytes / read_s, 2.0 * multiplied.numel() * TOKENS / multiply_s)


def _best(run: Callable[[], Tensor], device: torch.device) -> float:
    """Returns the least seconds that it takes."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    run()
    while True:
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - began)
        if now > end:
            return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
