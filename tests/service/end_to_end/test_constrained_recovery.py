"""Workers that are killed in the middle of a request that is constrained, sampled and drafted for: its output is the
one that it would have been."""

import json
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
import psutil
import pytest

import penstock.v1 as pb
from penstock.service.app.embedded import local_service
from penstock.v1.admin_pb2_grpc import AdminServiceStub
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

RECORDS = {
    "type": "array",
    "minItems": 150,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
}
CONSTRAINT = pb.Constraint(json_schema=json.dumps(RECORDS))
"""Much of it is forced, and always drafted. The rest is up to a drafter: how much of it is drafted, the time says that
steps take."""
KILL_AT = (120, 240)
"""Characters of the output."""
SERVING = pb.SERVICE_STATE_SERVING


class Output(NamedTuple):
    """What came of a request."""

    text: str
    restarts: int
    accepted: int
    """Drafts."""


class Killer:
    """Kills the worker, which is none of ``others``, when so many characters of a request have come, and again."""

    def __init__(self, kill_at: Sequence[int], admin: AdminServiceStub, others: Collection[psutil.Process]) -> None:
        self._left = list(kill_at)
        self._admin = admin
        self._others = set(others)
        stats = self._stats()
        self._num_killed = stats.worker_restarts
        self._num_finished = stats.finished_requests

    def saw(self, num_chars: int) -> None:
        if self._left and num_chars >= self._left[0]:
            if not self._runs():
                self._left.clear()
                return
            [worker] = workers() - self._others
            worker.kill()
            self._num_killed += 1
            del self._left[0]

    def wait_until_replaced(self) -> None:
        """Waits for the worker after the last that was killed: until then the service refuses requests."""
        while (stats := self._stats()).worker_restarts < self._num_killed or stats.state != SERVING:
            time.sleep(0.01)

    def _runs(self) -> bool:
        """Waits until the request runs on the worker that followed those killed: what came may have been under way
        since before. Returns False if the request has ended, which a slow reader sees late."""
        while True:
            stats = self._stats()
            if stats.finished_requests > self._num_finished:
                return False
            if stats.worker_restarts == self._num_killed and stats.running_rows:
                return True
            time.sleep(0.01)

    def _stats(self) -> pb.WatchStatsResponse:
        return next(self._admin.WatchStats(pb.WatchStatsRequest(), timeout=120))


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param(None, id="forced tokens", marks=pytest.mark.soak),
        pytest.param({"method": "suffix"}, id="suffix", marks=pytest.mark.soak),
        pytest.param({"method": "draft_model", "model": "demo_draft"}, id="draft model"),
    ],
)
def test_killed_workers_change_nothing(drafts: dict[str, str] | None, tmp_path: Path) -> None:
    """In float32: on the reference backend steps of other sizes differ in their last bits."""
    small = {"kv_cache_memory_bytes": "64M", "max_model_len": 2048, "threads": 1, "dtype": "float32"}
    sampling = pb.SamplingParams(temperature=1.0, repetition_penalty=1.05, seed=1, max_tokens=1200)
    start = pb.GenerationStart(text="An example:", constraint=CONSTRAINT, sampling=sampling)
    undrafted = pb.GenerationStart(text="An example:", constraint=CONSTRAINT, sampling=sampling, max_draft_tokens=0)
    others = workers()
    admin_target = f"unix:{tmp_path / 'admin'}"
    with (
        local_service("demo", speculative_config=drafts, admin_listen=admin_target, **small) as target,
        grpc.insecure_channel(target) as channel,
        grpc.insecure_channel(admin_target) as admin,
    ):
        stub = GenerationServiceStub(channel)
        plain = generate(stub, undrafted)
        undisturbed = generate(stub, start)
        # Until the worker dies suffixes have the last output to draft from, which is this one.
        while True:
            killer = Killer(KILL_AT, AdminServiceStub(admin), others)
            disturbed = generate(stub, start, killer)
            if disturbed.restarts >= len(KILL_AT):
                break
            killer.wait_until_replaced()  # on a busy machine the request had ended before the worker was killed
    assert (plain.restarts, undisturbed.restarts, disturbed.restarts) == (0, 0, len(KILL_AT))
    assert plain.text == undisturbed.text == disturbed.text
    assert len(plain.text) > KILL_AT[-1] + 40
    assert plain.accepted == 0
    assert disturbed.accepted > 0


def generate(stub: GenerationServiceStub, start: pb.GenerationStart, killer: Killer | None = None) -> Output:
    text, finished = "", pb.Finished()
    for answer in stub.GenerateOne(pb.GenerateOneRequest(start=start), timeout=120):
        text += "".join(delta.text for delta in answer.deltas)
        if killer is not None:
            killer.saw(len(text))
        if answer.HasField("finished"):
            finished = answer.finished
    return Output(text, finished.timings.restarts, finished.speculation.accepted_tokens)


def workers() -> set[psutil.Process]:
    """Of all services that this process has started."""
    children = psutil.Process().children(recursive=True)
    return {child for child in children if any("penstock.models.worker.main" in word for word in child.cmdline())}
