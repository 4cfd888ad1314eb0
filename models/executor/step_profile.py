"""What a profile of steps is, and the process that measures one. Imports no tensor library."""

import os
import subprocess
import sys
from collections.abc import Callable

import msgspec

from penstock.models.errors import ModelError
from penstock.models.executor.child_process import child_environment
from penstock.scheduler.worker_config import WorkerConfig

PROGRAM = "penstock.models.worker.step_profile"


class ProfiledLoad(msgspec.Struct, frozen=True):
    """The requests whose steps are measured: all of them are computed together."""

    rows: int
    prompt_tokens: int
    """Tokens of each row's prompt."""
    output_tokens: int
    """Tokens of each row's output; at least 2, as the first one comes from the last step of its prompt."""
    rounds: int = 3
    """How many times prompts are computed and decoded."""
    step_tokens: int | None = None
    """The tokens of prompts in a step; None: as many as the service computes in one."""

    @property
    def blocks_per_row(self) -> int:
        """The blocks of 16 tokens in which a row's KV is kept."""
        return -(-(self.prompt_tokens + self.output_tokens) // 16)


class ProfileJob(msgspec.Struct, frozen=True):
    """What the process is to measure."""

    worker: WorkerConfig
    load: ProfiledLoad


class StageTime(msgspec.Struct, frozen=True):
    """A stage's part of a step, or of several."""

    name: str
    seconds: float
    share: float
    """The part of the step's time."""
    limit_seconds: float | None = None
    """The least time by the bytes that the stage reads and the operations that it computes; None if these are too few
    to matter."""
    limited_by: str | None = None
    """memory or arithmetic, whichever takes longer."""

    @property
    def share_of_limit(self) -> float | None:
        """How close the stage is to its limit: 1 is as fast as the machine can be."""
        return None if self.limit_seconds is None or self.seconds <= 0 else self.limit_seconds / self.seconds


class StepTime(msgspec.Struct, frozen=True):
    """The mean time of a step, by stages, which add up to it."""

    kind: str
    """decode: one token of each row; prefill: the prompts, in one step or several."""
    tokens: int
    seconds: float
    stages: list[StageTime]
    """The longest first."""


class StepProfile(msgspec.Struct, frozen=True):
    """The profile of a model on a machine."""

    instruction_set: str
    threads: int
    weights: str
    """The format of most weights: float32, bfloat16, int8 or int4."""
    kv_cache_dtype: str
    bytes_per_s: float
    """What the machine reads at best with these threads."""
    operations_per_s: dict[str, float]
    """What its arithmetic reaches at best with these threads, by type."""
    steps: list[StepTime]


class ProfileMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the process's output; one field is set."""

    progress: str = ""
    profile: StepProfile | None = None
    problem: str = ""


def profile_steps(job: ProfileJob, on_progress: Callable[[str], object]) -> StepProfile:
    """Measures in a process of its own, which ends with the call. Raises ModelError."""
    command = [sys.executable, "-P", "-m", PROGRAM]
    environment = child_environment(os.environ)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            for line in process.stdout:
                message = msgspec.json.decode(line, type=ProfileMessage)
                if message.problem:
                    raise ModelError(message.problem)
                if message.profile is not None:
                    return message.profile
                on_progress(message.progress)
        except BrokenPipeError:
            pass  # it ended before it read the job
        finally:
            process.kill()
    raise ModelError(f"the process that measures steps ended with status {process.returncode}")
