"""An engine over the worker's code without its process, that drafts and matches grammars as a worker does."""

import asyncio
import itertools
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.models.backends.base import Backend, load_backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.draft_rows import Drafted
from penstock.models.speculative.drafter import Drafter, NoDrafter, Wanted, valid_part
from penstock.models.structured_output.manager import grammars_of
from penstock.models.worker.adapter_thread import load_adapter
from penstock.models.worker.runner import Runner
from penstock.models.worker.speculation import check_speculation, make_controller, make_drafter
from penstock.scheduler.adapters import Adapter
from penstock.scheduler.engine_stats import EngineStats
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import (
    AdapterLoad,
    AdapterLoaded,
    Pooling,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from penstock.scheduler.request import (
    Embedded,
    EngineFinishReason,
    Event,
    Prompt,
    PromptLogprobsChunk,
    Request,
    RequestFinished,
    SequenceDelta,
    TextDelta,
)
from penstock.scheduler.worker_config import WorkerConfig, WorkerFacts


class SteadyCost(StepCost):
    """The time of a step is what it is guessed to be, so what is drafted does not depend on the machine's load."""

    def __init__(self) -> None:
        super().__init__(2048)

    def measure(self, run: Callable[[int], object], most: int, clock: Callable[[], float]) -> None:
        pass

    def observe(self, num_tokens: int, seconds: float, is_fenced: bool) -> None:
        pass


class Eager(SpeculationController):
    """All that is proposed is drafted, whatever it costs; bounds are kept as ever."""

    def __init__(self, drafter: Drafter, max_drafts: int) -> None:
        super().__init__(drafter, max_drafts, SteadyCost(), runs_ahead=False, clock=lambda: 0.0)

    def _draft(self, wanted: list[Wanted], plan: StepPlan, choosing_s: float) -> Drafted:
        drafts, room = {}, plan.max_drafts
        for one, proposal in zip(wanted, self._drafter.propose(wanted), strict=True):
            token_ids = valid_part(one, proposal).token_ids[: min(one.max_drafts, room)]
            if token_ids:
                drafts[one.row.number] = token_ids
                room -= len(token_ids)
        return Drafted(drafts)


class InProcessExecutor:
    """The worker's code without its process, so that a test need not import torch again for each engine."""

    def __init__(self, config: WorkerConfig, is_eager: bool = False, deaths: Iterable[int] = ()) -> None:
        """``is_eager``: it drafts all that it may, and else as it finds worth the while; ``deaths``: plans, counted
        over all of its lives, in the place of whose answers it dies."""
        self._config = config
        self._is_eager = is_eager
        self._deaths = set(deaths)
        self._due: deque[Callable[[], StepResult]] = deque()
        self._changed = asyncio.Event()
        self._num_answered = 0
        self.plans: list[StepPlan] = []
        self.adapter_loads: list[AdapterLoad] = []

    async def start(self) -> WorkerFacts:
        config = check_speculation(self._config)
        grammars = None if config.tokenizer is None else grammars_of(config)
        backend = load_backend(config)
        self._runner = Runner(backend, self._drafting(config, backend), grammars)
        if config.speculation is not None and not self._is_eager:
            self._runner.warm()  # it measures what drafts cost
        self._stopped = False
        return backend.facts

    def _drafting(self, config: WorkerConfig, backend: Backend) -> SpeculationController | None:
        if not self._is_eager:
            return make_controller(config, backend)
        if config.speculation is None:  # it drafts from predictions, with a clock that stands still
            return SpeculationController(NoDrafter(), 0, SteadyCost(), runs_ahead=False, clock=lambda: 0.0)
        return Eager(make_drafter(config, backend), config.speculation.num_speculative_tokens)

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        # As the worker does: a backend that runs ahead has the next plan before it answers the last one.
        runner = self._runner
        self._due.append(runner.start_step(plan) if runner.runs_ahead else partial(runner.run, plan))
        self._changed.set()

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        self.adapter_loads.append(load)
        spec = check_checkpoint(Path(self._config.model), weights=False).spec
        return load_adapter(self._runner._backend, spec, self._config.max_lora_rank, load)

    async def results(self) -> AsyncIterator[StepResult]:
        while not self._stopped:
            if not self._due:
                self._changed.clear()
                await self._changed.wait()
                continue
            self._num_answered += 1
            if self._num_answered in self._deaths:
                raise ExecutorError("it dies here")
            yield self._due.popleft()()

    def kill(self, why: str) -> None:
        raise AssertionError(why)

    async def stop(self) -> None:
        self._stopped = True
        self._due.clear()
        self._changed.set()


class NoText:
    """A text state for tests that look at ids alone."""

    def feed(self, token_id: int) -> TextDelta:
        return TextDelta(1, "")

    def finish(self) -> TextDelta:
        return TextDelta(0, "")

    def restart(self) -> None:
        pass


@dataclass
class Answer:
    """What came of one request; of its first choice, where it has several."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[list[int], list[float]]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobsChunk] = field(default_factory=list)
    finished: RequestFinished | None = None
    others: defaultdict[int, "Answer"] = field(default_factory=lambda: defaultdict(Answer))
    """The other choices, by their number."""

    def take(self, event: Event) -> None:
        match event:
            case SequenceDelta() if event.choice:
                self.others[event.choice].take(replace(event, choice=0))
            case SequenceDelta():
                self.token_ids += event.token_ids
                if event.logprobs is not None:
                    self._take_logprobs(event.logprobs)
            case PromptLogprobsChunk():
                self.prompt_logprobs.append(event)
            case RequestFinished():
                self.finished = event

    def _take_logprobs(self, logprobs: TokenLogprobs) -> None:
        self.logprobs += logprobs.chosen
        k = logprobs.num_top
        for t in range(len(logprobs.chosen)):
            self.tops.append((logprobs.top_token_ids[t * k : t * k + k], logprobs.top[t * k : t * k + k]))

    @property
    def output(self) -> tuple[Any, ...]:
        """All that its caller is told of its tokens, in however many parts it came."""
        parts = [part.logprobs for part in self.prompt_logprobs]
        of_prompt = [
            [value for part in parts for value in values(part)]
            for values in (attrgetter("chosen"), attrgetter("top_token_ids"), attrgetter("top"))
        ]
        others = {choice: other.output for choice, other in self.others.items()}
        return self.token_ids, self.logprobs, self.tops, of_prompt, others


@dataclass
class Vectors:
    """What came of one request for vectors."""

    bytes: dict[int, bytes] = field(default_factory=dict)
    """By the number of the prompt."""
    finished: RequestFinished | None = None

    def take(self, event: Event) -> None:
        match event:
            case Embedded():
                self.bytes[event.choice] = event.vector
            case RequestFinished():
                self.finished = event

    def arrays(self) -> list[NDArray[np.float32]]:
        assert self.finished is not None
        assert self.finished.reason is EngineFinishReason.STOP, self.finished
        return [np.frombuffer(self.bytes[index], dtype=np.float32) for index in range(len(self.bytes))]


class EngineUnderTest:
    """An engine with prompts put in and answers taken out."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()

    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        max_tokens: int,
        tenant: str = "default",
        adapter: Adapter | None = None,
        **more: Any,
    ) -> Answer:
        """``more`` are fields of the request."""
        answer = Answer()
        salt = tenant_salt("test", tenant, b"" if adapter is None else adapter.digest)
        self.engine.submit(
            Request(
                request_id=str(next(self._ids)),
                prompt_token_ids=prompt,
                block_hashes=hash_blocks(prompt, self.engine.facts.block_size, salt),
                sampling=sampling,
                max_tokens=max_tokens,
                sink=answer.take,
                make_text=NoText,
                tenant=tenant,
                hash_salt=salt,
                adapter=adapter,
                **more,
            )
        )
        return answer

    def submit_pooled(self, prompts: list[list[int]], pooling: Pooling) -> Vectors:
        """One request for the vectors of all prompts."""
        vectors, salt = Vectors(), tenant_salt("test", "default")
        first, *others = [Prompt(ids, hash_blocks(ids, self.engine.facts.block_size, salt)) for ids in prompts]
        self.engine.submit(
            Request(
                request_id=str(next(self._ids)),
                prompt_token_ids=first.token_ids,
                block_hashes=first.block_hashes,
                sampling=SamplingParams(),
                max_tokens=0,
                sink=vectors.take,
                make_text=NoText,
                n=len(prompts),
                hash_salt=salt,
                pooling=pooling,
                more_prompts=others,
            )
        )
        return vectors

    async def run(self, prompts: list[list[int]], sampling: SamplingParams, max_tokens: int) -> list[Answer]:
        """All prompts at once; returns when all are answered."""
        answers = [self.submit(prompt, sampling, max_tokens) for prompt in prompts]
        await self.finish(answers)
        return answers

    async def finish(self, answers: list[Answer]) -> None:
        """Waits until all are answered, as they should be."""
        await self.engine.wait_idle()
        for answer in answers:
            assert answer.finished is not None
            assert answer.finished.reason in (EngineFinishReason.LENGTH, EngineFinishReason.STOP), answer.finished

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()
