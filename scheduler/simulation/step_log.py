"""The format of a step log: a line about the service, then a line of JSON for each step."""

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import StepPlan, StepResult
from penstock.scheduler.policy import Policy
from penstock.scheduler.timing.step_time import StepWork
from penstock.scheduler.worker_config import WorkerFacts

FORMAT = 1
"""Increases when a field is renamed or removed, or changes its meaning."""
_AGAIN = "write the log again with this version's penstock serve --step-log"

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StepLogError(ValueError):
    """A step log cannot be read. The text is one line with the file, the line and a remedy."""


class LoggedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits with which the service was started: fields of ``SchedulerConfig``."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    policy: Policy
    enable_prefix_caching: bool
    target_itl_s: float | None = None

    @classmethod
    def of(cls, config: SchedulerConfig) -> "LoggedLimits":
        """Returns the limits of a config."""
        return cls(**{name: getattr(config, name) for name in cls.__struct_fields__})


class StepLogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: what is needed to build the same scheduler again."""

    step_log: int
    """``FORMAT``."""
    penstock: str
    """The version that wrote the log."""
    max_drafts: int = 0
    """The maximum number of drafts of a row in a step."""
    limits: LoggedLimits
    facts: WorkerFacts


class LoggedStep(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One step: its work, as in ``StepWork``, and its times. ``submitted_s`` and ``answered_s`` are relative to the
    start of the log."""

    step: _Count
    prefill_tokens: _Count = 0
    prefill_kv: _Count = 0
    decodes: _Count = 0
    decode_kv: _Count = 0
    chunks: _Count = 0
    chunk_kv: _Count = 0
    copied_blocks: _Count = 0
    drafts: _Count = 0
    """The number of drafts that were computed."""
    accepted: _Count = 0
    """The number of drafts that were accepted."""
    seconds: _Seconds
    """The time that the worker took, from the start of the step or from the end of the one before, whichever is
    later."""
    waited_s: _Seconds
    """The time that the worker waited for the plan; 0 if it had the plan before the last step ended."""
    submitted_s: _Seconds
    """When the plan was sent."""
    answered_s: _Seconds
    """When the result was received."""
    handled_s: _Seconds
    """The time that the service then took: to apply the result, to make the next plan and to send messages."""

    @property
    def work(self) -> StepWork:
        """The work without its drafts."""
        return StepWork(
            self.prefill_tokens, self.prefill_kv, self.decodes, self.decode_kv, self.chunks, self.chunk_kv,
            self.copied_blocks,
        )  # fmt: skip


class StepTimes(NamedTuple):
    """When something happened to a step, in seconds from the start of the log."""

    submitted_s: float
    answered_s: float
    handled_at_s: float


def logged_step(plan: StepPlan, result: StepResult, times: StepTimes) -> LoggedStep:
    """Returns the line of a step."""
    decoding = {decode.row for decode in plan.decodes}
    drafted = [row for row in result.rows if row.num_drafted]
    num_drafted = sum(row.num_drafted for row in drafted)
    num_accepted = sum(max(0, len(row.token_ids) - 1) for row in drafted)
    # The length that a row had before the step, unless it skipped the step.
    decode_kv = sum(row.num_computed for row in result.rows if row.row in decoding) - num_accepted
    work = {name: int(value) for name, value in StepWork.of(plan, decode_kv)._asdict().items()}
    return LoggedStep(
        step=plan.step,
        **work,
        drafts=num_drafted,
        accepted=num_accepted,
        seconds=result.computed_us * 1e-6,
        waited_s=result.waited_us * 1e-6,
        submitted_s=round(times.submitted_s, 6),
        answered_s=round(times.answered_s, 6),
        handled_s=round(times.handled_at_s - times.answered_s, 6),
    )


class StepLog(NamedTuple):
    """A log that was read."""

    header: StepLogHeader
    steps: list[LoggedStep]


def read_step_log(path: Path) -> StepLog:
    """Reads a log. A last line that was not written to its end is ignored. Raises StepLogError."""
    try:
        with path.open("rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise StepLogError(f"cannot read {path}: {error.strerror}") from None
    lines.pop()  # what follows the last end of a line
    if not lines:
        raise StepLogError(f"{path} is empty; {_AGAIN}")
    header = _read_header(path, lines[0])
    decoder = msgspec.json.Decoder(LoggedStep)
    steps = []
    for number, line in enumerate(lines[1:], 2):
        try:
            steps.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StepLogError(f"{path}, line {number}: not a step: {error}; remove the line, or {_AGAIN}") from None
    return StepLog(header, steps)


def _read_header(path: Path, line: bytes) -> StepLogHeader:
    """Returns the first line's content. Raises StepLogError."""
    where = f"{path}, line 1"
    try:
        version = msgspec.json.decode(line).get("step_log")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError):
        version = None
    if version is None:
        raise StepLogError(f"{where}: not a step log; give a file that penstock serve --step-log wrote")
    if version != FORMAT:
        raise StepLogError(f"{where}: its format is {version!r}, and this penstock reads {FORMAT}; {_AGAIN}")
    try:
        header = msgspec.json.decode(line, type=StepLogHeader)
    except msgspec.DecodeError as error:
        raise StepLogError(f"{where}: {error}; {_AGAIN}") from None
    facts = header.facts
    for name in ("num_blocks", "block_size", "vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(facts, name) < 1:
            raise StepLogError(f"{where}: facts.{name} is {getattr(facts, name)}; it must be at least 1; {_AGAIN}")
    if facts.pipeline_parallel_size != 1:
        raise StepLogError(
            f"{where}: comes from a model in {facts.pipeline_parallel_size} stages, whose times overlap; write the log "
            "with one stage, and give --pipeline-parallel-size to the simulation"
        )
    return header
