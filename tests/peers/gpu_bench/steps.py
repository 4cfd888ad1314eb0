"""Whole steps of the backend: layers, head, sampling and what moves rows on, as a service's worker runs them.

Rows are put on pages of random numbers, as if a prefix cache had held their prompts.
"""

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from gpu_bench.figures import (
    Ceiling,
    ChoiceFigures,
    DecodeFigures,
    DeterministicFigures,
    Figures,
    HostMemoryFigures,
    LeftOut,
    PrefillFigures,
    ProfileFigures,
    TurnFigures,
)
from gpu_bench.host_memory import Turns, compare_ways, num_blocks
from gpu_bench.sizes import Model, Sizes
from gpu_bench.timing import seconds as seconds_of
from penstock.kernels.cuda.attention.common import PAGE_SLOTS
from penstock.models.backends.base import load_backend
from penstock.models.backends.cuda.backend import CudaBackend
from penstock.models.backends.cuda.model import Hidden
from penstock.models.backends.cuda.steps.step_io import Size
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, SamplingParams, StepPlan, StepResult
from penstock.scheduler.worker_config import WorkerConfig

AHEAD = 2
"""Steps that are begun before the first of them is waited for, as a service does."""
WARM_STEPS = 2
ROUNDS = 2
"""Of both ways to a first token; half as many where nothing is warmed."""
UNPROFILED = nullcontext()
MOST_KERNELS = 14
"""The number of kernels that a profile names."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Decoded:
    """What steps of decoding took."""

    step_s: float
    between_s: float
    """From one step's end to the next one's start on the device."""
    token_ids: list[int]
    """Of the first row."""


class Bench:
    """A loaded model."""

    def __init__(self, model: Model, sizes: Sizes, *, has_host: bool = False, **config: Any) -> None:
        """``has_host``: host memory takes in the KV of two prompts of ``sizes.evicted``. ``config`` has more fields of
        ``WorkerConfig``."""
        self.sizes = sizes
        self._warm_steps = WARM_STEPS if sizes.is_warmed else 0
        with TemporaryDirectory() as folder:
            model.write_config(Path(folder))
            backend = load_backend(
                WorkerConfig(
                    model=folder,
                    device=sizes.device,
                    backend="cuda",
                    load_format="dummy",
                    max_model_len=self._end(max(*sizes.contexts, *sizes.prompts) + max(sizes.turns)),
                    max_num_seqs=max(sizes.batches),
                    max_num_batched_tokens=sizes.chunk,
                    kv_cache_bytes=sizes.kv_cache_bytes,
                    host_kv_cache_bytes=_evicted_bytes(model, sizes) if has_host else 0,
                    memory_utilization=0.9,
                    **{"kv_cache_dtype": "fp8" if model.shape.kv_dtype is torch.float8_e4m3fn else "auto", **config},
                )
            )
        assert isinstance(backend, CudaBackend)
        self._backend = backend
        self._device = torch.device(sizes.device)
        self._runner = Runner(backend)
        if sizes.is_warmed:
            self._runner.warm()
        for kv in backend._model._kv.values():
            for pages in torch.split(kv.pages, 1024):
                pages.copy_(torch.randn_like(pages, dtype=torch.float32))

    def choices(self, model: Model) -> Iterator[ChoiceFigures]:
        """Yields what the backend measured at its start. Without a GPU, it measures now, by the clock."""
        linears = self._backend._model._linears
        if self._device.type != "cuda":
            with torch.inference_mode():
                linears.measure(1, partial(seconds_of, device=self._device))
        for each in linears.choice.measured:
            form = each.form
            yield ChoiceFigures(
                model.name, form.rows, form.columns, form.tokens_text, each.kernels_s, each.torch_s, each.is_torchs
            )

    def fits(self, batch: int, context: int) -> bool:
        """Whether there are pages for that many rows of that context."""
        return batch * self._pages_of(context) <= self._backend.facts.num_blocks

    def _pages_of(self, context: int) -> int:
        return -(-self._end(context) // PAGE_SLOTS)

    def _end(self, context: int) -> int:
        return context + self._warm_steps + self.sizes.steps + 1

    def decode(self, batch: int, context: int, profiler: AbstractContextManager[object] = UNPROFILED) -> Decoded:
        """Runs steps of decoding; the timed ones run under ``profiler``. Afterwards the pages hold what they held
        before, except for the last positions of the rows."""
        pages = self._pages_of(context)
        history = [7] * context
        added = [
            AddedRow(row, 0, history, context, context - 1, list(range(row * pages, (row + 1) * pages)), GREEDY)
            for row in range(batch)
        ]
        chunks = [Chunk(row, context - 1, context) for row in range(batch)]
        self._runner.run(StepPlan(0, [], added, [], chunks, []))
        plan = StepPlan(0, [], [], [], [], [Decode(row, 1) for row in range(batch)])
        self._run([plan] * self._warm_steps)
        with Gaps(self._backend, self._device) as gaps, profiler:
            began = time.perf_counter()
            results = self._run([plan] * self.sizes.steps)
            seconds = (time.perf_counter() - began) / self.sizes.steps
        self._runner.run(StepPlan(0, list(range(batch)), [], [], [], []))
        return Decoded(
            seconds, gaps.median(), [token_id for result in results for token_id in result.rows[0].token_ids]
        )

    def _run(self, plans: list[StepPlan]) -> list[StepResult]:
        """The next ones begin while one is computed."""
        begun: deque[Callable[[], StepResult]] = deque()
        results = []
        for plan in plans:
            begun.append(self._runner.start_step(plan))
            if len(begun) == AHEAD:
                results.append(begun.popleft()())
        return results + [finish() for finish in begun]

    def prefill(self, tokens: int, profiler: AbstractContextManager[object] = UNPROFILED) -> float:
        """Seconds for a prompt, in chunks. The last time is the one that counts; it runs under ``profiler``."""
        seconds = 0.0
        for turn in range(1 + self.sizes.is_warmed):
            blocks = list(range(-(-(tokens + 1) // PAGE_SLOTS)))
            added = [AddedRow(0, 0, [7] * tokens, tokens, 0, blocks, GREEDY)]
            plans = [
                StepPlan(
                    0, [], [] if begin else added, [], [Chunk(0, begin, min(tokens, begin + self.sizes.chunk))], []
                )
                for begin in range(0, tokens, self.sizes.chunk)
            ]
            with profiler if turn == self.sizes.is_warmed else nullcontext():
                began = time.perf_counter()
                self._run(plans)
                seconds = time.perf_counter() - began
            self._runner.run(StepPlan(0, [0], [], [], [], []))
        return seconds

    def turn(self, context: int, tokens: int) -> float:
        """Seconds for the next turn of a chat, the shortest of some: ``tokens`` after a context that is in pages."""
        end = context + tokens
        times = []
        for _ in range(1 + 3 * self.sizes.is_warmed):
            added = [AddedRow(0, 0, [7] * end, end, context, list(range(self._pages_of(end))), GREEDY)]
            began = time.perf_counter()
            self._run([StepPlan(0, [], added, [], [Chunk(0, context, end)], [])])
            times.append(time.perf_counter() - began)
            self._runner.run(StepPlan(0, [0], [], [], [], []))
        return min(times)

    def bring_back(self, model: Model) -> HostMemoryFigures:
        """A prompt's KV from host memory."""
        turns = Turns(self._backend, self.sizes.evicted)
        found = compare_ways(turns, ROUNDS if self.sizes.is_warmed else 1)
        return HostMemoryFigures(
            model=model.name,
            tokens=self.sizes.evicted,
            computed_s=statistics.median(found.computed_s),
            restored_s=statistics.median(found.restored_s),
            restored_tokens=found.restored_tokens,
            copied_bytes=found.restored_tokens * model.kv_bytes,
            is_right=found.is_equal,
        )


def _evicted_bytes(model: Model, sizes: Sizes) -> int:
    return 2 * num_blocks(sizes.evicted, PAGE_SLOTS) * PAGE_SLOTS * model.kv_bytes


class Gaps:
    """Takes the device's time from one step's end to the next one's start. Without CUDA, the clock's."""

    def __init__(self, backend: CudaBackend, device: torch.device) -> None:
        self._graphs, self._cuda = backend._graphs, device.type == "cuda"
        self._marks: list[tuple[Mark, Mark]] = []

    def __enter__(self) -> "Gaps":
        run = self._graphs.run

        def marked(size: Size, wait: Callable[[], None]) -> Hidden:
            before = self._mark()
            made = run(size, wait)
            self._marks.append((before, self._mark()))
            return made

        self._graphs.run = marked  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._graphs.run

    def _mark(self) -> "Mark":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def median(self) -> float:
        """Seconds; of steps that are no graph, 0."""
        if self._cuda:
            torch.cuda.synchronize()
        gaps = [_between(end, start) for (_, end), (start, _) in zip(self._marks, self._marks[1:], strict=False)]
        return statistics.median(gaps) if gaps else 0.0


Mark = torch.cuda.Event | float


def _between(end: Mark, start: Mark) -> float:
    if isinstance(end, float) or isinstance(start, float):
        assert isinstance(end, float)
        assert isinstance(start, float)
        return start - end
    return float(end.elapsed_time(start)) / 1e3


def measure(model: Model, sizes: Sizes, ceiling: Ceiling | None) -> Iterator[Figures | LeftOut]:
    """Prompts, turns of a chat, a prompt that was evicted, then every batch with every context."""
    bench, work = Bench(model, sizes, has_host=True), model.work
    rates = ceiling or Ceiling(float("inf"), float("inf"))
    for tokens in sizes.prompts:
        seconds = bench.prefill(tokens)
        products = 2.0 * (work.layer_weights * tokens + work.head_weights) + work.attention_operations(tokens**2 / 2)
        rate = products / seconds
        yield PrefillFigures(model.name, tokens, seconds, rate, rate / rates.products_per_s)
    yield from bench.choices(model)
    yield from _turns(bench, model, rates)
    yield bench.bring_back(model)
    yield from _decode(bench, model, rates)
    yield from _profile(bench, model)


def _turns(bench: Bench, model: Model, rates: Ceiling) -> Iterator[Figures]:
    work = model.work
    for context in bench.sizes.contexts:
        for tokens in bench.sizes.turns:
            seconds = bench.turn(context, tokens)
            read = (model.weight_bytes + (context + tokens) * model.kv_bytes) / rates.copied_bytes_per_s
            pairs = tokens * (context + tokens / 2)
            products = 2.0 * (work.layer_weights * tokens + work.head_weights) + work.attention_operations(pairs)
            floor = max(read, products / rates.products_per_s)
            yield TurnFigures(model.name, context, tokens, seconds, floor, floor / seconds)


def _profile(bench: Bench, model: Model) -> Iterator[Figures]:
    """Yields the kernels of steps of decoding, and of one prompt."""
    sizes = bench.sizes
    context, prompt = sizes.contexts[0], sizes.prompts[min(1, len(sizes.prompts) - 1)]
    for batch in sizes.profiled:
        with_kernels = _profiler(sizes)
        bench.decode(batch, context, with_kernels)
        yield from _kernels(model, f"decode {batch} x {context}", with_kernels, sizes.steps)
    with_kernels = _profiler(sizes)
    bench.prefill(prompt, with_kernels)
    yield from _kernels(model, f"prompt of {prompt}", with_kernels, 1)


def _profiler(sizes: Sizes) -> torch.profiler.profile:
    kind = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kind.CUDA if sizes.device == "cuda" else kind.CPU], acc_events=True)


def _kernels(model: Model, step: str, profiler: torch.profiler.profile, steps: int) -> Iterator[ProfileFigures]:
    """Yields those that take the most time."""
    events = profiler.key_averages()
    found = [(event.key, event.count, event.self_device_time_total / 1e6) for event in events]
    if not any(seconds for _, _, seconds in found):  # no GPU
        found = [(event.key, event.count, event.self_cpu_time_total / 1e6) for event in events]
    total = sum(seconds for _, _, seconds in found) or 1.0
    for name, calls, seconds in sorted(found, key=lambda line: line[2], reverse=True)[:MOST_KERNELS]:
        yield ProfileFigures(model.name, step, name[:60], calls / steps, seconds / steps, seconds / total)


def measure_fp8(model: Model, sizes: Sizes, ceiling: Ceiling | None) -> Iterator[Figures | LeftOut]:
    """Every batch with every context, on a KV cache in fp8."""
    model = model.with_fp8_kv()
    yield from _decode(Bench(model, sizes), model, ceiling or Ceiling(float("inf"), float("inf")))


def _decode(bench: Bench, model: Model, rates: Ceiling) -> Iterator[Figures | LeftOut]:
    sizes, work = bench.sizes, model.work
    kv = str(model.shape.kv_dtype).removeprefix("torch.")
    for batch in sizes.batches:
        for context in sizes.contexts:
            if not bench.fits(batch, context):
                yield LeftOut("decode", f"{model.name} {kv} batch {batch} context {context}", "its KV does not fit")
                continue
            decoded = bench.decode(batch, context)
            middle = context + sizes.steps / 2
            read = (model.weight_bytes + batch * middle * model.kv_bytes) / rates.copied_bytes_per_s
            products = 2.0 * batch * (work.layer_weights + work.head_weights) + work.attention_operations(
                batch * middle
            )
            floor = max(read, products / rates.products_per_s)
            step = decoded.step_s
            yield DecodeFigures(model.name, kv, batch, context, step, floor, floor / step, decoded.between_s)


def compare(model: Model, sizes: Sizes) -> Iterator[Figures]:
    """The cost of --deterministic, and what it gives."""
    batch, context = sizes.compared
    plain = batch / Bench(model, sizes).decode(batch, context).step_s
    gc.collect()  # the first model, which has cycles of references
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    bench = Bench(model, sizes, deterministic=True)
    decoded = bench.decode(batch, context)
    rate = batch / decoded.step_s
    is_same = bench.decode(1, context).token_ids == decoded.token_ids
    yield DeterministicFigures(model.name, batch, context, plain, rate, 1 - rate / plain, is_same)
