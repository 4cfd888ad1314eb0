"""The CPU backend: a step is one call into the library, which runs the model and samples the tokens."""

import ctypes
import logging
import math

import numpy as np

from penstock.kernels.cpu.bindings import LANES, LibraryMissing, SampledToken, StorageFormat, address, find_kernels
from penstock.kernels.cpu.program import Library, Memory, Step, typed_library
from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.base import SynchronousBackend, context_of, shared_facts
from penstock.models.backends.cpu.memory import FirstPages
from penstock.models.backends.cpu.model import CpuModel, StorageFormats, block_bytes, load_model, max_weight_bytes
from penstock.models.backends.cpu.sampling import SamplingRows
from penstock.models.backends.cpu.weights import DummyTensors, FileTensors, Tensors, is_kept
from penstock.models.backends.memory import allocated, check_weights_fit, num_kv_blocks
from penstock.models.batch.batch import Batch, BatchResult, Sampled
from penstock.models.batch.pooled_row import PooledRow
from penstock.models.batch.rows import Ids, Row
from penstock.models.batch.sampled_positions import SampledPosition
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.errors import ModelError
from penstock.scheduler.plan import PromptLogprobsPart, TokenLogprobs
from penstock.scheduler.worker_config import WorkerConfig, WorkerFacts

logger = logging.getLogger(__name__)

DTYPES = {"float32": StorageFormat.F32, "bfloat16": StorageFormat.BF16}

NARROW = {"float16": "bfloat16", "float64": "float32"}
"""What ``auto`` chooses for a checkpoint in another dtype."""

SMALL_STEP = 1 << 26
"""The limit in parameters times tokens. In a smaller step a second thread gains less than it costs the service's loop,
with which it shares the cores: a guess, not measured."""

STEP_S = 0.15
OPERATIONS_PER_S = {"amx": 800e9, "neon_bf16": 100e9, "neon_dot": 40e9, "neon": 20e9}
"""The approximate speed of a thread by instruction set: an order of magnitude is enough. Those of Arm are computed from
the registers and the clock of typical processors, not measured."""
OTHER_OPERATIONS_PER_S = 250e9
"""The same for any other instruction set."""
INTEGER_OPERATIONS_PER_S = {"amx": 1600e9, "avx512_bf16": 500e9, "avx512_vnni": 500e9}
"""The same for products with integer weights, where they are faster. Measured for avx512_vnni only."""
MIN_BATCHED_TOKENS = 64
"""Products of fewer rows are slower, and each decoding row needs one row."""
MOST_BATCHED_TOKENS = 256
"""Products of more rows are not faster."""

TILE_TOKENS = 32
"""Products are computed in tiles of this many rows, or a part of one."""


class CpuBackend(SynchronousBackend):
    """A ``Backend`` over the CPU library."""

    def __init__(self, model: CpuModel, pages: Memory, facts: WorkerFacts, num_parameters: int) -> None:
        self.facts = facts
        self.model = model
        self._first_pages = FirstPages(pages, model.model.page_bytes)
        self._program = model.program(pages)
        self._num_logits = model.model.num_logits
        self._small_step = SMALL_STEP // num_parameters
        self._sampling = SamplingRows()

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Does nothing: the kernel that first writes a page zeroes its masked slots."""

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        """Never called: there is no host tier, so no plan has copies."""
        raise AssertionError("the device's memory is the host's")

    copy_in = copy_out

    def run(self, batch: Batch) -> BatchResult:
        """Runs the layers and samples the tokens: in one call, or in two if masks are awaited in between."""
        sampling = self._sampling.gather(batch.sampled)
        sampled = batch.sampled_tokens
        tokens = (SampledToken * len(sampled))()
        room = sampling.num_top
        top_ids = np.empty((len(sampled), room), dtype=np.int32)
        tops = np.empty((len(sampled), room), dtype=np.float32)
        spans, pooled_spans = list(batch.prompt_spans()), list(batch.pooled_spans())
        scores = _Scores(spans, self._num_logits) if spans else None
        pooled = _Pooled(pooled_spans) if pooled_spans else None
        features = _Features(batch, self.facts.hidden_size) if batch.feature_layers else None
        tables = np.ascontiguousarray(batch.tables)
        step = Step(
            num_tokens=len(batch.token_ids),
            num_rows=len(batch.rows),
            num_sampled=len(sampled),
            token_ids=address(batch.token_ids),
            starts=address(batch.starts),
            ends=address(batch.ends),
            token_starts=address(batch.token_starts),
            tables=address(tables),
            table_stride=tables.shape[1],
            sampled=address(sampled),
            sampling=sampling.address,
            tokens=ctypes.addressof(tokens),
            room=room,
            top_ids=address(top_ids),
            tops=address(tops),
            **(scores.fields if scores else {}),
            **(pooled.fields if pooled else {}),
            **(features.fields if features else {}),
        )
        num_threads = 1 if len(batch.token_ids) <= self._small_step else self.facts.num_threads
        with self._first_pages.paused():
            if batch.masks is None:
                self._program.run(step, num_threads)
            else:
                self._program.start_step(step, num_threads)
                masks = batch.masks.words.result()
                assert 32 * masks.shape[1] >= self._num_logits, "a mask has a bit for every token"
                sampling.mask(batch.masks.sampled, masks)
                self._program.finish()
        return BatchResult(
            _sampled(batch.sampled, tokens, top_ids, tops),
            scores.parts() if scores else [],
            features.array if features else None,
        )

    def prefault(self) -> None:
        self._first_pages.start_prefault()

    def seconds(self) -> dict[str, float]:
        """Returns the time spent in each stage of a step so far."""
        return self._program.seconds()


def _sampled(
    sampled: list[SampledPosition],
    tokens: "ctypes.Array[SampledToken]",
    top_ids: "np.ndarray[tuple[int, int], np.dtype[np.int32]]",
    tops: "np.ndarray[tuple[int, int], np.dtype[np.float32]]",
) -> list[Sampled]:
    results = []
    for index, (sample, token) in enumerate(zip(sampled, tokens, strict=True)):
        logprobs = None
        if sample.row.sampling.logprobs is not None:
            top = token.num_top
            logprobs = TokenLogprobs(top, [token.logprob], top_ids[index, :top].tolist(), tops[index, :top].tolist())
        results.append(Sampled(token.token_id, logprobs))
    return results


class _Scores:
    """The log-probabilities of prompt tokens that a batch computes: the library's inputs and outputs."""

    def __init__(self, spans: list[tuple[Row, int, int, int]], num_logits: int) -> None:
        self._spans = spans
        parts = [np.arange(first, first + count) for _, first, count, _ in spans]
        prompts = [row.history[position : position + count] for row, _, count, position in spans]
        for part in prompts:
            assert max(part) < num_logits, "prompts' ids are checked against the tokenizer's vocabulary"
        self._tops = tops = [min(row.sampling.prompt_logprobs or 0, num_logits) for row, _, _, _ in spans]
        tokens: Ids = np.concatenate(parts)
        targets: Ids = np.array([token for part in prompts for token in part], dtype=np.int64)
        num_tops: Ids = np.repeat(np.array(tops, dtype=np.int64), [len(part) for part in prompts])
        room = max(tops)
        self._chosen = np.empty(len(tokens), dtype=np.float32)
        self._top_ids = np.empty((len(tokens), room), dtype=np.int32)
        self._log_probabilities = np.empty((len(tokens), room), dtype=np.float32)
        self._kept = (tokens, targets, num_tops)
        self.fields = {
            "num_scored": len(tokens), "scored": address(tokens), "targets": address(targets),
            "num_tops": address(num_tops), "scored_room": room, "chosen": address(self._chosen),
            "scored_top_ids": address(self._top_ids), "scored_tops": address(self._log_probabilities),
        }  # fmt: skip
        """Fields of the step. What they point to lives as long as this object."""

    def parts(self) -> list[PromptLogprobsPart]:
        parts = []
        begin = 0
        for (row, _, count, position), top in zip(self._spans, self._tops, strict=True):
            end = begin + count
            logprobs = TokenLogprobs(
                top,
                self._chosen[begin:end].tolist(),
                self._top_ids[begin:end, :top].ravel().tolist(),
                self._log_probabilities[begin:end, :top].ravel().tolist(),
            )
            parts.append(PromptLogprobsPart(row.number, row.epoch, position, logprobs))
            begin = end
        return parts


class _Pooled:
    """The tokens of a batch whose hidden states are added to vectors, and the vectors' addresses."""

    def __init__(self, spans: list[tuple[PooledRow, int, int]]) -> None:
        parts = [np.arange(first, first + count) for _, first, count in spans]
        tokens: Ids = np.concatenate(parts)
        starts: Ids = np.cumsum([0, *(count for _, _, count in spans)], dtype=np.int64)
        # Addresses; the rows own what they point to.
        vectors: Ids = np.array([address(row.total) for row, _, _ in spans], dtype=np.int64)
        self._kept = (tokens, starts, vectors)
        self.fields = {
            "num_vectors": len(vectors), "num_pooled": len(tokens), "pooled": address(tokens),
            "pooled_starts": address(starts), "vectors": address(vectors),
        }  # fmt: skip


class _Features:
    """The output buffer for a batch's hidden states before its feature layers."""

    def __init__(self, batch: Batch, hidden_size: int) -> None:
        layers = np.array(batch.feature_layers, dtype=np.int32)
        self.array = np.empty((len(batch.token_ids), len(layers) * hidden_size), dtype=np.float32)
        self._kept = layers
        self.fields = {
            "num_features": len(layers), "feature_layers": address(layers), "features": address(self.array),
        }  # fmt: skip


def unsupported_reason(config: WorkerConfig, info: CheckpointInfo) -> str | None:
    """Returns why this backend cannot run the model with this config, with the remedy; None if it can."""
    if config.device != "cpu":
        return f"--device is {config.device}, and this backend is for CPUs: give --device cpu, or leave --backend out"
    if config.dtype not in ("auto", *DTYPES):
        return (
            f"--dtype is {config.dtype}, and this backend has bfloat16 and float32: give one of them, or leave --dtype "
            "out"
        )
    if config.tensor_parallel_size > 1:
        return (
            f"--tensor-parallel-size is {config.tensor_parallel_size}, and this backend uses all cores in one process: "
            "leave that out"
        )
    if info.at_load(config.quantization) == "fp8":
        return "--quantization fp8 is for the backend cuda: give int8, which takes the same bytes"
    if config.block_size % LANES:
        return f"--block-size is {config.block_size}, and pages hold {LANES} tokens: give a multiple of that"
    if _experts_differ(info):
        return "its experts are quantised differently, or by act-order: use a checkpoint with desc_act or actorder off"
    try:
        typed_library()
    except LibraryMissing as error:
        return str(error)
    return None


def _experts_differ(info: CheckpointInfo) -> bool:
    """Whether experts need differently prepared inputs: inputs are prepared once for all of them."""
    experts = [name.removesuffix(".weight") for name, shape in info.spec.tensors() if ".experts." in name and shape[1:]]
    linears = [info.quantized.get(name) for name in experts]
    schemes = {linear.scheme if linear is not None and is_kept(linear.scheme) else None for linear in linears}
    return len(schemes) > 1 or any(scheme is not None and scheme.is_ordered for scheme in schemes)


def load(config: WorkerConfig, info: CheckpointInfo) -> CpuBackend:
    """The factory for the backend registry; ``unsupported_reason`` must be None. Raises ModelError."""
    spec = info.spec
    dtype = NARROW.get(info.dtype, info.dtype) if config.dtype == "auto" else config.dtype
    if dtype != info.dtype and config.dtype == "auto":
        logger.info("the checkpoint is in %s, which this backend computes in %s", info.dtype, dtype)
    quantization = info.choose_quantization(config.quantization)
    if quantization == "none" and info.is_eight_bit:
        quantization = "int8"
        logger.info("the weights are stored in eight bits, with a scale for 32 columns; int8 has one for each row")
    if config.host_kv_cache_bytes:
        raise ModelError(
            "--host-kv-cache-bytes: on a CPU the KV cache is in host memory already, and copies gain nothing: give "
            "these bytes to --kv-cache-memory-bytes"
        )
    formats = _formats(config, info, dtype, quantization)
    max_model_len = context_of(config, spec)
    kernels = find_kernels()
    assert kernels is not None, "every machine runs the generic kernels"
    library = _start_threads(config)
    max_bytes = max_weight_bytes(spec, formats, info.quantized, kernels)
    check_weights_fit(config, spec.architecture, max_bytes, dtype if quantization == "none" else quantization)
    num_logits = min(config.tokenizer_vocab_size or spec.vocab_size, spec.vocab_size)
    tensors: Tensors = DummyTensors() if config.load_format == "dummy" else FileTensors(info)
    try:
        model = load_model(spec, formats, tensors, library, kernels, max_bytes, num_logits, config.block_size)
    except MemoryError as error:
        raise ModelError(
            f"{spec.architecture}: its weights of {max_bytes >> 20} MiB cannot be allocated on cpu: choose a smaller "
            "--dtype, --quantization int8 or int4 or a smaller model, or raise the process's limit (ulimit -v)"
        ) from error
    if not math.isfinite(model.error.squared_weights):
        raise ModelError(f"{spec.architecture}: a weight is not a finite number: download the weights again")
    if model.error.squared_weights:
        logger.info("%s: the weights' relative error is %.2f %%", quantization, 100 * model.error.relative)
    num_bytes = block_bytes(spec, formats.kv, config.block_size)
    num_blocks = num_kv_blocks(config, num_bytes, max_model_len)
    with allocated(num_blocks, "cpu"):
        # A page belongs to whichever row comes, and any thread may read it, so pages alternate between nodes: then no
        # node's memory is read more than another's. A page has 16 tokens of all heads, and memory is placed in units
        # of 4 KiB or 2 MiB, so heads cannot be placed one by one.
        pages = library.shared_memory(num_blocks * num_bytes)
    instruction_set = kernels.name.decode()
    has_integers = quantization in ("int8", "int4") or any(is_kept(each.scheme) for each in info.quantized.values())
    budget = _default_budget(spec, instruction_set, config.num_threads, has_integers=has_integers)
    facts = WorkerFacts(
        **shared_facts(config, info, num_blocks, budget),
        backend="cpu",
        dtype=dtype,
        kv_cache_dtype="int8" if formats.kv is StorageFormat.INT8 else dtype,
        quantization=quantization,
        kv_bytes=num_blocks * num_bytes,
        weight_bytes=model.weight_bytes,
        num_threads=config.num_threads,
        instruction_set=instruction_set,
    )
    return CpuBackend(model, pages, facts, spec.num_parameters)


def _start_threads(config: WorkerConfig) -> Library:
    if nodes := sorted(set(config.thread_nodes)):
        logger.info("threads and weights are divided among the NUMA nodes %s", ", ".join(map(str, nodes)))
    if config.thread_cpus and all(len(cpus) == 1 for cpus in config.thread_cpus):
        pinned = ", ".join(str(cpu) for (cpu,) in config.thread_cpus)
        logger.info("each compute thread is pinned to a core of its own, of %s", pinned)
    return Library(config.num_threads, cpus=config.thread_cpus, nodes=config.thread_nodes)


def _default_budget(spec: ModelSpec, instruction_set: str, num_threads: int, *, has_integers: bool) -> int:
    """Returns the tokens that a step computes in about ``STEP_S``. A new request waits this long, and products are
    nearly as fast as with more tokens. ``has_integers``: whether weights are integers."""
    looked_up = spec.vocab_size * spec.hidden_size
    if spec.layer_inputs is not None:
        looked_up += spec.layer_inputs.vocab_size * spec.layer_inputs.size * spec.num_layers
    per_token = 2 * max(1, spec.num_parameters - looked_up)
    per_s = OPERATIONS_PER_S.get(instruction_set, OTHER_OPERATIONS_PER_S)
    if has_integers:
        per_s = INTEGER_OPERATIONS_PER_S.get(instruction_set, per_s)
    tokens = STEP_S * per_s * num_threads / per_token
    return min(MOST_BATCHED_TOKENS, max(MIN_BATCHED_TOKENS, TILE_TOKENS * math.ceil(tokens / TILE_TOKENS)))


def _formats(config: WorkerConfig, info: CheckpointInfo, dtype: str, quantization: str) -> StorageFormats:
    plain = DTYPES[dtype]
    weights = {"int8": StorageFormat.INT8, "int4": StorageFormat.INT4}.get(quantization, plain)
    # The head decides between tokens with close logits, so it keeps eight bits even if the layers have four.
    head = StorageFormat.INT8 if quantization in ("int8", "int4") else plain
    return StorageFormats(weights, head, plain, kv_format(config, info, dtype))


def kv_format(config: WorkerConfig, info: CheckpointInfo, dtype: str) -> StorageFormat:
    """Returns the type of the KV cache of a model with activations in ``dtype``. Raises ModelError.

    Where this backend quantises the weights, ``auto`` is int8: that adds little to their error, and attention reads
    half the bytes.
    """
    wanted = config.kv_cache_dtype
    if wanted not in ("auto", "int8", dtype):
        why = "is for the backend cuda" if wanted == "fp8" else f"the activations are in {dtype}"
        raise ModelError(f"--kv-cache-dtype {wanted}: {why}: give auto, {dtype} or int8")
    is_int8 = wanted == "int8" or (wanted == "auto" and info.at_load(config.quantization) is not None)
    return StorageFormat.INT8 if is_int8 else DTYPES[dtype]
