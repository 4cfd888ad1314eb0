"""Rows without a scheduler: a runner that is given plans by hand, on a model, or on a device that only takes time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from penstock.models.backends.base import Backend, SynchronousBackend
from penstock.models.batch.batch import Batch, BatchResult, FeatureLines, Sampled
from penstock.models.batch.rows import Row
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.drafter import Drafter, Proposal, Wanted
from penstock.models.worker.runner import Runner
from penstock.scheduler.plan import AddedRow, Chunk, Decode, RowResult, SamplingParams, StepPlan
from penstock.scheduler.worker_config import WorkerFacts

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Asked:
    """What a row is to be computed for."""

    prompt: list[int]
    sampling: SamplingParams = GREEDY
    max_drafts: int = 8
    tenant: str = ""
    prediction: list[int] = field(default_factory=list)


@dataclass
class Told:
    """What came of it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[int], list[float]]] = field(default_factory=list)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def take(self, result: RowResult) -> None:
        """One step's result."""
        self.token_ids += result.token_ids
        self.num_steps += 1
        if result.num_drafted:
            self.num_drafted += result.num_drafted
            self.num_accepted += len(result.token_ids) - 1
        if result.logprobs is not None:
            part, k = result.logprobs, result.logprobs.num_top
            assert len(part.chosen) == len(result.token_ids)
            for t, chosen in enumerate(part.chosen):
                self.logprobs.append((chosen, part.top_token_ids[t * k : t * k + k], part.top[t * k : t * k + k]))


class Player:
    """Plays the scheduler: rows begin all at once, and are continued until each has its tokens."""

    def __init__(
        self, backend: Backend, controller: SpeculationController | None, clock: Callable[[], int] = lambda: 0
    ) -> None:
        self.runner = Runner(backend, controller, clock=clock)
        self._facts = backend.facts
        self._epoch = 0

    def run(
        self,
        asked: list[Asked],
        num_tokens: int,
        room: int = 1 << 10,
        repeats: Callable[[int], bool] = lambda step: False,
    ) -> list[Told]:
        """``num_tokens`` of each row, or up to 8 more; with up to ``room`` drafts in a step. ``repeats`` returns
        whether the texts repeat themselves in a step."""
        self._epoch += 1
        told = [Told() for _ in asked]
        size, next_block, added = self._facts.block_size, 0, []
        for row, one in enumerate(asked):
            end = next_block - (-(len(one.prompt) + num_tokens + one.max_drafts + 8) // size)
            added.append(
                AddedRow(row, self._epoch, one.prompt, len(one.prompt), 0, list(range(next_block, end)), one.sampling,
                         max_drafts=one.max_drafts, tenant=one.tenant, prediction=one.prediction)
            )  # fmt: skip
            next_block = end
        chunks = [Chunk(row, 0, len(one.prompt)) for row, one in enumerate(asked)]
        self._take(StepPlan(0, [], added, [], chunks, [], max_drafts=room), told)
        step = 0
        while going := [row for row, so_far in enumerate(told) if len(so_far.token_ids) < num_tokens]:
            decodes = [Decode(row, 1 + asked[row].max_drafts) for row in going]
            repeating = going if repeats(step) else []
            self._take(StepPlan(0, [], [], [], [], decodes, max_drafts=room, repeating=repeating), told)
            step += 1
        self.runner.run(StepPlan(0, list(range(len(asked))), [], [], [], []))
        for whole in told:
            del whole.token_ids[num_tokens:], whole.logprobs[num_tokens:]
        return told

    def _take(self, plan: StepPlan, told: list[Told]) -> None:
        result = self.runner.run(plan)
        assert sum(row.num_drafted for row in result.rows) <= plan.max_drafts
        for row in result.rows:
            assert row.epoch == self._epoch
            told[row.row].take(row)


class Clock:
    """Time that goes on only when something takes some."""

    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self) -> float:
        """For drafting."""
        return self.now

    def nanoseconds(self) -> int:
        """For a runner."""
        return round(self.now * 1e9)


def next_token(history_length: int, row: int) -> int:
    """What the device below chooses at a position."""
    return (history_length * 7 + row * 13) % 97


class Device(SynchronousBackend):
    """A ``Backend`` whose steps take a time by their number of tokens, and nothing else."""

    facts = WorkerFacts(1 << 16, 16, 97, 1 << 16, 256, 2048, "", "", "", "", "", 0, 0)

    def __init__(self, clock: Clock, seconds: Callable[[int], float]) -> None:
        self._clock = clock
        self.seconds = seconds

    def reset_blocks(self, block_ids: list[int]) -> None:
        """Nothing is kept."""

    def copy_out(self, copies: list[tuple[int, int]]) -> None:
        """Nothing is kept."""

    copy_in = copy_out

    def prefault(self) -> None:
        """There is none."""

    def run(self, batch: Batch) -> BatchResult:
        """Takes its time."""
        self._clock.now += self.seconds(len(batch.token_ids))
        features = np.zeros((len(batch.token_ids), 1), np.float32) if batch.feature_layers else None
        sampled = [Sampled(next_token(line.position, line.row.number), None) for line in batch.sampled]
        return BatchResult(sampled, [], features)


class Fortune(Drafter):
    """A ``Drafter`` whose drafts are right as often as ``is_right(row, position)`` says, and that takes its time."""

    def __init__(self, clock: Clock, is_right: Callable[[Row, int], bool], ask_s: float, confidence: float) -> None:
        self._clock = clock
        self.is_right = is_right
        self._ask_s = ask_s
        self._confidence = confidence
        self.num_asked = 0

    def propose(self, wanted: Iterable[Wanted]) -> list[Proposal]:
        """As many as there may be."""
        return [self._propose(row, max_drafts) for row, max_drafts in wanted]

    def drop_row(self, row: Row) -> None:
        """Nothing is kept."""

    def _propose(self, row: Row, max_drafts: int) -> Proposal:
        self._clock.now += self._ask_s
        self.num_asked += 1
        begin = len(row.history)
        drafts = [
            next_token(at, row.number) if self.is_right(row, at) else 97 for at in range(begin, begin + max_drafts)
        ]
        return Proposal(drafts, [self._confidence] * max_drafts)


class Rounds(Fortune):
    """Likewise, but each draft takes a step of a model of its own; and it reads along with the rows that it follows, if
    that takes time. What it has not read it cannot draft for."""

    by_rounds = True

    def __init__(
        self,
        clock: Clock,
        is_right: Callable[[Row, int], bool],
        round_s: Callable[[int], float],
        read_s: float,
        confidence: float,
    ) -> None:
        super().__init__(clock, is_right, 0.0, confidence)
        self._round_s = round_s
        self._read_s = read_s
        self._num_read: dict[Row, int] = {}
        self.followed: set[Row] = set()
        self.num_rounds = 0
        if read_s:
            self.feature_layers = (1,)

    def backlog(self, row: Row) -> int:
        """All of the row, at first."""
        return 0 if self._read_s else max(0, len(row.history) - 1 - self._num_read.get(row, 0))

    def follow(self, row: Row) -> None:
        """It must not be followed already."""
        assert self._read_s
        assert row not in self.followed
        self.followed.add(row)

    def leave(self, row: Row) -> None:
        """It must be followed."""
        self.followed.remove(row)

    def drop_row(self, row: Row) -> None:
        """Whether it is followed or not."""
        self.followed.discard(row)
        self._num_read.pop(row, None)

    def read(self, batch: Batch, features: FeatureLines) -> None:
        """Takes its time for each token."""
        counts = zip(batch.rows, (batch.ends - batch.starts).tolist(), strict=True)
        self._clock.now += self._read_s * sum(count for row, count in counts if row in self.followed)

    def propose(self, wanted: Iterable[Wanted]) -> list[Proposal]:
        """A round for each draft, of all rows that have one more."""
        wanted = list(wanted)
        if self._read_s:
            assert self.followed.issuperset(row for row, _ in wanted)
        backlog = sum(self.backlog(row) for row, _ in wanted)
        for place in range(max(most for _, most in wanted)):
            self.num_rounds += 1
            self._clock.now += self._round_s(sum(most > place for _, most in wanted) + (0 if place else backlog))
        for row, _ in wanted:
            self._num_read[row] = len(row.history)
        return super().propose(wanted)


@dataclass
class Simulation:
    """Rows on a device, with and without drafts."""

    seconds: Callable[[int], float]
    """Of a step, by its number of tokens."""
    is_right: Callable[[Row, int], bool]
    """Of a draft, by the row and its position."""
    num_rows: int = 1
    ask_s: float = 1e-5
    confidence: float = 0.8
    max_drafts: int = 8
    round_s: Callable[[int], float] | None = None
    """Of a round of so many rows, where the drafter works by rounds."""
    read_s: float = 0.0
    """Of a token that it reads along."""

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.device = Device(self.clock, self.seconds)
        if self.round_s is None:
            self.drafter = Fortune(self.clock, self.is_right, self.ask_s, self.confidence)
        else:
            self.drafter = Rounds(self.clock, self.is_right, self.round_s, self.read_s, self.confidence)
        costs = StepCost(self.device.facts.max_num_batched_tokens)
        controller = SpeculationController(
            self.drafter, self.max_drafts, costs, runs_ahead=False, clock=self.clock.seconds
        )
        self.player = Player(self.device, controller, self.clock.nanoseconds)
        self.player.runner.warm()

    def run(self, num_tokens: int, room: int = 1 << 10) -> tuple[float, list[Told]]:
        """How many times as fast as without drafts a number of tokens of each row is, and what came of the rows."""
        asked = [Asked([1], max_drafts=self.max_drafts)] * self.num_rows
        began = self.clock.now
        told = self.player.run(asked, num_tokens, room)
        for row, one in enumerate(told):
            assert one.token_ids == [next_token(at, row) for at in range(1, num_tokens + 1)]
        return num_tokens * self.device.seconds(self.num_rows) / (self.clock.now - began), told


@pytest.fixture
def simulation() -> type[Simulation]:
    """For test modules, which cannot import a conftest."""
    return Simulation


@pytest.fixture
def player() -> type[Player]:
    """Likewise."""
    return Player


@pytest.fixture
def asked() -> type[Asked]:
    """Likewise."""
    return Asked
