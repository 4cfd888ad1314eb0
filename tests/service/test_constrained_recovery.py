"""Workers that are killed in the middle of a request that is constrained, sampled and drafted for: its output is the
one that it would have been."""

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

import grpc
import psutil
import pytest

from penstock.service.local import local_service
from penstock.v1 import constraint_pb2, generation_pb2 as pb
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

RECORDS = {
    "type": "array",
    "minItems": 30,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
}
CONSTRAINT = constraint_pb2.Constraint(json_schema=json.dumps(RECORDS))
"""Much of it is forced, and always drafted. The rest is up to a drafter: how much of it is drafted, the time says that
steps take."""
KILL_AT = (120, 240)
"""Characters of the output."""


class Output(NamedTuple):
    """What came of a request."""

    text: str
    restarts: int
    accepted: int
    """Drafts."""


@pytest.mark.parametrize(
    "drafts",
    [None, {"method": "suffix"}, {"method": "draft_model", "model": "demo_draft"}],
    ids=["forced tokens", "suffix", "draft model"],
)
def test_killed_workers_change_nothing(drafts: dict[str, str] | None) -> None:
    """In float32: on the reference backend steps of other sizes differ in their last bits."""
    small = {"kv_cache_memory_bytes": "64M", "max_model_len": 1024, "threads": 1, "dtype": "float32"}
    sampling = pb.Sampling(temperature=1.0, repetition_penalty=1.05, seed=1, max_tokens=240)
    start = pb.Start(text="An example:", constraint=CONSTRAINT, sampling=sampling)
    undrafted = pb.Start(text="An example:", constraint=CONSTRAINT, sampling=sampling, max_draft_tokens=0)
    others = workers()
    with local_service("demo", speculative_config=drafts, **small) as target, grpc.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        plain = generate(stub, undrafted)
        undisturbed = generate(stub, start)
        # Until the worker dies suffixes have the last output to draft from, which is this one.
        disturbed = generate(stub, start, KILL_AT, others)
    assert (plain.restarts, undisturbed.restarts, disturbed.restarts) == (0, 0, len(KILL_AT))
    assert plain.text == undisturbed.text == disturbed.text
    assert len(plain.text) > KILL_AT[-1] + 40
    assert plain.accepted == 0
    assert disturbed.accepted > 0


def generate(
    stub: GenerationServiceStub, start: pb.Start, kill_at: Sequence[int] = (), others: Collection[psutil.Process] = ()
) -> Output:
    """Streams it; kills the worker, which is none of the others, whenever so many characters have come."""
    left = list(kill_at)
    text, finished = "", pb.Finished()
    for answer in stub.GenerateOne(pb.GenerateOneRequest(start=start), timeout=120):
        text += "".join(delta.text for delta in answer.deltas)
        if left and len(text) >= left[0]:
            [worker] = workers() - set(others)
            worker.kill()
            del left[0]
        if answer.HasField("finished"):
            finished = answer.finished
    return Output(text, finished.timings.restarts, finished.speculation.accepted_tokens)


def workers() -> set[psutil.Process]:
    """Of all services that this process has started."""
    children = psutil.Process().children(recursive=True)
    return {child for child in children if any("penstock.models.worker" in word for word in child.cmdline())}
