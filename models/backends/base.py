"""The interface of backends and their registry. Imports no tensor library until a backend is chosen."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, Protocol

from penstock.models.architecture.foreign import ForeignSpec
from penstock.models.architecture.registry import nearest
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.kv_groups import KvGroups
from penstock.models.batch.batch import Batch, BatchResult
from penstock.models.batch.row_states import StateCommit
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.lora.adapter import LoraAdapter
from penstock.models.errors import ModelError
from penstock.scheduler.worker_config import DraftMethod, WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A loaded model with its KV pages. Not thread-safe; calls run strictly in order."""

    @property
    def facts(self) -> WorkerFacts:
        """The properties of the loaded model and its limits."""

    @property
    def runs_ahead(self) -> bool:
        """Whether ``start_step`` returns before the batch is computed."""

    @property
    def needs_tokens(self) -> bool:
        """Whether a batch may only start once all tokens of its rows are known, although it ``runs_ahead``."""

    @property
    def states(self) -> "RecurrentStates | None":
        """The rows' recurrent states; None if the model has none."""

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Discards the blocks' content so that none of it can be read: they have a new owner, who will write them."""

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        """Copies blocks to slots of the host tier: pairs of block and slot. Later calls see the copies."""

    def copy_in(self, copies: list[tuple[int, int]]) -> None:
        """Copies slots of the host tier to blocks, bit for bit: pairs of slot and block. Later calls see the copies."""

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        """Writes a LoRA adapter into a slot that no row uses, while batches run on another thread. Raises ModelError;
        the slot must then be written again before a row uses it."""

    def prefault(self) -> None:
        """Allocates the memory that the first requests will write. Called once, after all measurements."""

    def start_step(self, batch: Batch) -> "Finish":
        """Starts the layers, which write the KV of every token, then samples the next token of each row whose history
        is fully computed, and adds to the vectors of pooled rows. If this continues without the caller, the next batch
        may start before this one is finished: its rows' newest tokens are then ``UNKNOWN``."""


class RecurrentStates(Protocol):
    """The slots of a model's recurrent states. Calls run strictly in order with the backend's steps, which advance the
    states of their rows by ``Batch.states``."""

    def begin(self, slot: int, source: int) -> None:
        """Copies the state in ``source`` to ``slot``, or writes zeros if it is ``NO_SLOT``."""

    def commit(self, batch: Batch, commits: list[StateCommit]) -> None:
        """Advances states by tokens of the step that was computed last, which it computed from copies of them."""


Finish = Callable[[], BatchResult]
"""Waits until a batch is computed. It is called once per batch, in order, possibly on another thread."""


class LaterStage(Protocol):
    """A rank of a model in stages that is not rank 0: layers, whose batches come from rank 0."""

    @property
    def facts(self) -> WorkerFacts:
        """The properties of its part of the model."""

    def serve(self) -> NoReturn:
        """Computes batches until rank 0 is lost. Raises PeerLost."""


class SynchronousBackend(ABC):
    """A base class for backends that compute a batch within ``start_step``."""

    runs_ahead, needs_tokens = False, False
    states: RecurrentStates | None = None

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        """Never called: a backend without slots for adapters refuses them at the start."""
        raise AssertionError("there are no slots for adapters")

    @abstractmethod
    def run(self, batch: Batch) -> BatchResult:
        """Runs the whole step."""

    def start_step(self, batch: Batch) -> Finish:
        result = self.run(batch)
        return lambda: result


def context_of(
    config: WorkerConfig, spec: ModelSpec, num_blocks: int | None = None, groups: KvGroups | None = None
) -> int:
    """Returns the number of positions that a row may have: as many as the config has, else as the model was made for
    and ``num_blocks`` KV blocks hold, by default of one group. Raises ModelError if the config exceeds the model's."""
    max_model_len = config.max_model_len or spec.max_positions
    if max_model_len > spec.max_positions:
        raise ModelError(
            f"--max-model-len {max_model_len}: the model was made for {spec.max_positions}; give at most that"
        )
    if num_blocks is None or config.max_model_len is not None or config.num_blocks is not None:
        return max_model_len
    if groups is None:
        return min(max_model_len, num_blocks * config.block_size)
    return min(max_model_len, groups.in_blocks(config).longest(num_blocks))


def shared_facts(
    config: WorkerConfig,
    info: CheckpointInfo,
    num_blocks: int,
    default_budget: int,
    num_state_slots: int = 0,
    groups: KvGroups | None = None,
) -> dict[str, Any]:
    """Returns the ``WorkerFacts`` that follow from the config, the model's files, and the blocks of ``groups``.
    ``default_budget`` is the number of tokens in a step unless the config sets it. Logs a context that is shortened."""
    spec = info.spec
    max_model_len, wanted = context_of(config, spec, num_blocks, groups), context_of(config, spec)
    if max_model_len < wanted and config.tensor_parallel_rank == config.pipeline_parallel_rank == 0:
        logger.warning(
            "context %s: the KV cache holds no more, and the model was made for %s; raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization for longer requests, or give --max-model-len to choose",
            f"{max_model_len:,}",
            f"{wanted:,}",
        )
    max_num_seqs = min(config.max_num_seqs, num_state_slots) if spec.has_state else config.max_num_seqs
    if max_num_seqs < config.max_num_seqs:
        logger.warning(
            "at most %d sequences run at a time: half of the KV budget holds no more recurrent states; raise "
            "--kv-cache-memory-bytes or --gpu-memory-utilization for more",
            max_num_seqs,
        )
    return {
        "num_blocks": num_blocks,
        "block_size": config.block_size,
        "vocab_size": spec.vocab_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "num_state_slots": num_state_slots,
        "max_num_batched_tokens": config.max_num_batched_tokens or default_budget,
        "architecture": spec.architecture,
        "device": config.device,
        "hidden_size": spec.hidden_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_loras": config.max_loras,
        **({} if groups is None else groups.facts),
    }


@dataclass(frozen=True)
class _Entry:
    """A backend of the registry."""

    module: str
    """The module with its ``load``, and with its ``unsupported_reason`` unless it runs every model."""
    device: str | None
    """The device for which ``auto`` considers the backend; None for all."""
    extra: str
    """The package's extra that installs what the backend imports."""
    has_states: bool = False
    """Whether it runs recurrent layers."""
    has_stages: bool = False
    """Whether it can be one of several stages. Its module then has ``load_stage``."""
    has_adapters: bool = True
    """Whether it has slots for LoRA adapters."""


BACKENDS = {
    "cpu": _Entry("penstock.models.backends.cpu.backend", "cpu", "cpu", has_states=True, has_stages=True),
    "cuda": _Entry("penstock.models.backends.cuda.backend", "cuda", "cuda", has_states=True, has_stages=True),
    "reference": _Entry("penstock.models.backends.reference.backend", None, "torch", has_states=True, has_stages=True),
    "transformers": _Entry("penstock.models.backends.transformers_module.backend", None, "torch", has_adapters=False),
}
"""Backends by name. ``auto`` picks the first one that can run the model."""

FOREIGN = "transformers"
"""The backend that ``auto`` picks for architectures without a family, and only for them."""


def load_backend(config: WorkerConfig) -> Backend:
    """Loads a model with the backend that the config names, or with the best one. Raises ModelError."""
    module, info = _choose_backend(config)
    backend: Backend = module.load(config, info)
    return backend


def load_stage(config: WorkerConfig) -> LaterStage:
    """Loads a rank that only computes layers, with the same choice of the backend. Raises ModelError and PeerLost."""
    module, info = _choose_backend(config)
    stage: LaterStage = module.load_stage(config, info)
    return stage


def _choose_backend(config: WorkerConfig) -> tuple[ModuleType, CheckpointInfo]:
    """Returns the module of the backend, and the checked model. Raises ModelError."""
    if config.backend not in ("auto", *BACKENDS):
        raise ModelError(
            f"--backend {config.backend}: there is no such backend: choose auto or one of {', '.join(BACKENDS)}"
        )
    if config.load_format not in ("auto", "dummy"):
        raise ModelError(f"--load-format {config.load_format}: must be auto or dummy")
    info = check_checkpoint(Path(config.model), weights=config.load_format != "dummy")
    if config.tensor_parallel_rank == 0 and config.pipeline_parallel_rank == 0:
        _log_checkpoint(config, info)
    if info.spec.has_state and (conflict := _state_conflict(config, info)):
        raise ModelError(f"{conflict}: {info.spec.architecture} has recurrent layers, which do not work with it yet")
    reasons: list[str] = []
    for name in _candidates(config, info):
        entry = BACKENDS[name]
        try:
            module = import_module(entry.module)
            why_not = _why_not(name, module, config, info)
        except ModuleNotFoundError as error:
            why_not = f"{error.name} is not installed: pip install 'penstock-llm[{entry.extra}]'"
        if why_not is None:
            for reason in reasons:
                logger.warning("SLOW: this model runs on the %s backend. %s", name, reason)
            return module, info
        reasons.append(f"--backend {name}: {why_not}")
    raise ModelError("; ".join(reasons))


def _state_conflict(config: WorkerConfig, info: CheckpointInfo) -> str | None:
    """Returns what does not work with recurrent layers, with a remedy; None if everything does."""
    if config.tensor_parallel_size > 1:
        return f"leave --tensor-parallel-size {config.tensor_parallel_size} out"
    if config.pipeline_parallel_size > 1:
        return f"leave --pipeline-parallel-size {config.pipeline_parallel_size} out"
    if config.speculation is not None and config.speculation.method is DraftMethod.EAGLE3:
        return "choose another method than eagle3 for --speculative-config"
    if info.quantization is not None:
        return f"use the unquantised checkpoint instead of {info.path}, with --quantization int8 or int4"
    return None


def _log_checkpoint(config: WorkerConfig, info: CheckpointInfo) -> None:
    for warning in info.warnings:
        logger.warning("%s", warning)
    if info.kv_scales:
        use = "are used" if config.kv_cache_dtype == "fp8" else "are not used: they are for --kv-cache-dtype fp8"
        logger.info("%s: its %d scales of keys and values %s", info.path, len(info.kv_scales), use)


def _candidates(config: WorkerConfig, info: CheckpointInfo) -> list[str]:
    """Returns the names of the backends to try, the fastest first."""
    if config.backend != "auto":
        return [config.backend]
    if isinstance(info.spec, ForeignSpec):
        return [FOREIGN]
    kind = config.device.partition(":")[0]
    return [name for name, entry in BACKENDS.items() if entry.device in (kind, None) and name != FOREIGN]


def _why_not(name: str, module: ModuleType, config: WorkerConfig, info: CheckpointInfo) -> str | None:
    if isinstance(info.spec, ForeignSpec) and name != FOREIGN:
        return (
            f"{info.path / 'config.json'}: architectures names {info.spec.architecture}, which it does not have; the "
            f"closest is {nearest(info.config)}: give --backend {FOREIGN}, or leave it out"
        )
    if config.max_loras and not BACKENDS[name].has_adapters:
        return (
            f"--max-loras is {config.max_loras}, and this backend has no LoRA adapters: leave it and --lora-modules out"
        )
    if config.max_loras and info.path.is_file():
        return f"--max-loras is {config.max_loras}, and adapters for GGUF files are not supported: leave it out"
    if config.attention_backend != "triton" and name != "cuda":
        return f"--attention-backend {config.attention_backend} is for the cuda backend: leave it out"
    if config.pipeline_parallel_size > 1 and not BACKENDS[name].has_stages:
        able = " or ".join(other for other, entry in BACKENDS.items() if entry.has_stages)
        return (
            f"--pipeline-parallel-size is {config.pipeline_parallel_size}, and this backend has no stages: leave that "
            f"out, or give --backend {able}"
        )
    if info.spec.has_state and not BACKENDS[name].has_states:
        able = " or ".join(other for other, entry in BACKENDS.items() if entry.has_states)
        return f"{info.spec.architecture} has recurrent layers, which this backend does not run: give --backend {able}"
    reason: str | None = module.unsupported_reason(config, info) if hasattr(module, "unsupported_reason") else None
    return reason
