"""A draft head on the CPU library. Imports no tensor library."""

import ctypes
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.cpu.bindings import LANES, SampledToken, SamplingRow, address, find_kernels
from penstock.kernels.cpu.program import Library, Memory, Step
from penstock.models.backends.base import Backend
from penstock.models.backends.cpu.backend import CpuBackend
from penstock.models.backends.cpu.loading import DTYPES
from penstock.models.backends.cpu.model import CpuModel, load_model, seen_pairs
from penstock.models.backends.cpu.sizes import StorageFormats, block_bytes, max_weight_bytes
from penstock.models.backends.cpu.weights import FileTensors
from penstock.models.backends.memory import allocated, check_weights_fit
from penstock.models.checkpoint.draft_head import HeadCheckpoint
from penstock.models.errors import ModelError
from penstock.models.speculative.heads.head import Draws, HeadDraft, HeadResult, HeadStep, ids_on_host, joined
from penstock.scheduler.worker_config import WorkerConfig

SamplingLines = np.dtype(SamplingRow)
"""``SamplingRow`` as a NumPy dtype."""


class CpuHead:
    """A ``DraftHead`` of the CPU library."""

    def __init__(self, head: HeadCheckpoint, model: CpuModel, target: CpuModel, pages: Memory) -> None:
        self._model = model
        self._kept = (target, pages)
        self._program = model.program(pages)
        self._target_ids = head.target_ids[: model.model.num_logits]
        # Noise is read 16 entries at a time.
        self._noise_ids = np.pad(self._target_ids, (0, -len(self._target_ids) % LANES)).astype(np.int32)
        self._hidden_size = head.spec.hidden_size

    def reset_blocks(self, block_ids: Sequence[int]) -> None:
        """Does nothing: the kernel that first writes a page zeroes its masked slots."""

    def run(self, step: HeadStep) -> HeadResult:
        num_sampled = len(step.sampled)
        tokens = (SampledToken * num_sampled)()
        hidden = np.empty((num_sampled, self._hidden_size), dtype=np.float32)
        sampling = self._sampling(step.draws)
        token_ids = ids_on_host(step.token_ids)
        features = None if step.features is None else joined(step.features)
        given = None if step.hidden is None else joined([step.hidden])
        tables = np.ascontiguousarray(step.tables)
        step_of_head = Step(
            num_tokens=len(step.token_ids),
            num_rows=len(step.ends),
            num_sampled=num_sampled,
            token_ids=address(token_ids),
            starts=address(step.starts),
            ends=address(step.ends),
            token_starts=address(step.token_starts),
            tables=address(tables),
            table_stride=tables.shape[1],
            sampled=address(step.sampled),
            sampling=address(sampling),
            tokens=ctypes.addressof(tokens),
            features_in=None if features is None else address(features),
            hidden=None if given is None else address(given),
            hidden_out=address(hidden),
        )
        num_threads = self._model.num_threads(len(step.token_ids), seen_pairs(step.starts, step.ends))
        self._program.run(step_of_head, num_threads)
        chosen = self._target_ids[[token.token_id for token in tokens]]
        drafts = [
            HeadDraft(token_id, math.exp(token.logprob), token.noise)
            for token_id, token in zip(chosen.tolist(), tokens, strict=True)
        ]
        return HeadResult(lambda: drafts, chosen, hidden)

    def _sampling(self, draws: Draws) -> NDArray[np.void]:
        sampled = np.zeros(len(draws.seeds), dtype=SamplingLines)
        sampled["top_p"] = sampled["repetition_penalty"] = 1.0
        sampled["temperature"], sampled["seed"], sampled["position"] = draws
        sampled["noise_ids"] = address(self._noise_ids)
        return sampled


def load_head(config: WorkerConfig, head: HeadCheckpoint, backend: Backend) -> CpuHead:
    """Loads the head for a model on the CPU backend. Raises ModelError."""
    assert isinstance(backend, CpuBackend), "a head runs on its model's backend"
    spec, facts, target = head.spec, backend.facts, backend.model
    plain = DTYPES[facts.dtype]
    formats = StorageFormats(plain, plain, plain, plain)
    kernels = find_kernels()
    assert kernels is not None, "the model uses them"
    max_bytes = max_weight_bytes(spec, formats, {}, kernels)
    check_weights_fit(config, "the draft head", max_bytes, facts.dtype)
    library = Library(config.num_threads, cpus=config.thread_cpus, nodes=config.thread_nodes)
    tensors = FileTensors(head.info)
    try:
        model = load_model(spec, formats, tensors, library, kernels, max_bytes, spec.head_rows, facts.block_size)
    except MemoryError as error:
        raise ModelError(
            f"the draft head's weights of {max_bytes >> 20} MiB cannot be allocated on cpu: raise the process's "
            "limit (ulimit -v), or remove --speculative-config"
        ) from error
    shared = () if spec.has_embedding else ("embedding_format", "embedding", "packed_embedding")
    for name in (*shared, *(() if spec.has_head else ("head", "num_logits"))):
        setattr(model.model, name, getattr(target.model, name))
    with allocated(facts.num_blocks, "cpu"):
        pages = library.shared_memory(facts.num_blocks * block_bytes(spec, plain, facts.block_size))
    return CpuHead(head, model, target, pages)
