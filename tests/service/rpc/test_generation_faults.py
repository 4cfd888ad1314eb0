"""Figure 3: exactly one status for each request, whatever raises wherever, and soon; and nothing of what was
raised."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth import identity
from penstock.service.errors import ServiceError
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.live.lifecycle import RequestLifecycle
from penstock.service.rpc import generation
from penstock.service.rpc.frame_dispatcher import FrameDispatcher
from penstock.service.streaming import messages
from penstock.service.streaming.outbox import Outbox
from penstock.service.telemetry.tracing import Telemetry
from penstock.service.text.detokenizer import IncrementalDetokenizer
from penstock.service.text.tokenizer import Tokenizer, TokenizerPool

SECRET = "secret-of-ours"
HANGS_S = 120.0
"""Tens of milliseconds are usual, and a second is promised; but a machine that runs tests may stand still for one."""
MARK = "FAULT"
"""In the prompt of the request that goes wrong, where one can be told from others."""


class Fault(Exception):
    """What is raised."""

    def __init__(self) -> None:
        super().__init__(SECRET)


def raises(error: Callable[[], BaseException], after: int = 0) -> Callable[..., Any]:
    """A function that raises, the first times excepted."""
    calls = 0

    def fail(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error()

    return fail


def own_cancel() -> BaseException:
    """A CancelledError that nobody's cancel made: by itself, grpc.aio would send no status at all."""
    return asyncio.CancelledError(SECRET)


class FailingExecutor(FakeExecutor):
    """Fails after some steps, in one of its ways."""

    def __init__(self, way: str) -> None:
        super().__init__(vocab_size=258, next_token=lambda history, sampling: ord("a"), seconds_per_step=0.002)
        self.way = way
        self.answered = 0

    def submit(self, plan):
        """May fail."""
        if self.answered > 3 and self.way == "submit":
            self.die(SECRET)  # its results say so too
            raise ExecutorError(SECRET)
        if self.answered > 3 and self.way == "bug in submit":
            raise Fault
        super().submit(plan)

    async def results(self):
        """May fail."""
        async for result in super().results():
            self.answered += 1
            if self.answered > 3 and self.way == "death":
                raise ExecutorError(SECRET)
            if self.answered > 3 and self.way == "bug":
                raise Fault
            yield result


# Where, and what is put there. The class is patched, so that every instance of the service's has it.
SEAMS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "validator": (RequestBuilder, "check", raises(Fault)),
    "preparation": (RequestBuilder, "prepare", raises(Fault)),
    "pool": (TokenizerPool, "run", raises(Fault)),
    "pool is cancelled": (TokenizerPool, "run", raises(own_cancel)),
    "tokenizer": (Tokenizer, "encode", raises(Fault)),
    "tenant": (identity.Principal, "tenant_for", raises(Fault)),
    "telemetry of a call": (Telemetry, "call", raises(Fault)),
    "telemetry of a request": (Telemetry, "request", raises(Fault)),
    "text state is made": (RequestBuilder, "_make_text", raises(Fault)),
    "text state": (IncrementalDetokenizer, "feed", raises(Fault)),
    "sink": (RequestLifecycle, "_accept", raises(Fault)),
    "sink's accepted": (Outbox, "accepted", raises(Fault)),
    "sink's delta": (Outbox, "delta", raises(Fault)),
    "sink's end": (Outbox, "finished", raises(Fault)),
    "whole answer's delta": (generation._WholeAnswer, "delta", raises(Fault)),
    "whole answer's end": (generation._WholeAnswer, "finished", raises(Fault)),
    "message": (messages, "_fill", raises(Fault)),
    "message's delta": (messages, "fill_delta", raises(Fault)),
    "writer": (Outbox, "_write_next", raises(Fault)),
    "writer is cancelled": (Outbox, "_write_next", raises(own_cancel)),
    "outbox": (Outbox, "run", raises(Fault)),
    "stream": (FrameDispatcher, "_take", raises(Fault)),
    "call": (generation.GenerationService, "new_request", raises(Fault)),
    "call is cancelled": (generation.GenerationService, "new_request", raises(own_cancel)),
    "authenticator": (identity.AllowAll, "authenticate", raises(Fault)),
    "authenticator is cancelled": (identity.AllowAll, "authenticate", raises(own_cancel)),
}


def start(ref: int = 1) -> pb.GenerationStart:
    return pb.GenerationStart(ref=ref, text=MARK, sampling=pb.SamplingParams(max_tokens=50))


async def generate(service: Any, reading: Any) -> None:
    """Four requests on one stream."""
    while True:
        try:
            frames = [pb.GenerateRequest(start=start(ref)) for ref in range(1, 5)]
            await reading.read(service.generation.Generate(iter(frames)))
        except grpc.aio.AioRpcError as error:
            # grpc.aio's client says this of itself when a stream ends while it writes; what the service said is lost.
            if error.details() == "Internal error from Core":
                continue
            raise
        return


async def one_status_each(service: Any, new_reading: Any, details_of: Any) -> list[tuple[int, str, str]]:
    """Sends requests in every way; returns code, message and request id of what each came to."""
    found = []
    reading = new_reading()
    calls = {
        "Generate": lambda: generate(service, reading),
        "GenerateOne": lambda: generate_one(service),
        "Complete": lambda: service.generation.Complete(pb.CompleteRequest(start=start())),
    }
    for name, call in calls.items():
        stream_failed = False
        try:
            async with asyncio.timeout(HANGS_S):
                await call()
        except grpc.aio.AioRpcError as error:
            stream_failed = True
            request_id = details_of(error)["RequestInfo"].request_id
            found.append((error.code().value[0], error.details() or "", request_id))
        if name == "Generate":
            for ref in range(1, 5):
                ends = reading.outcomes[ref].finished
                # Where the stream itself failed, its status is that of the requests that had no end yet.
                assert len(ends) == 1 or (stream_failed and not ends)
                found += [(end.status.code, end.status.message, end.request_id) for end in ends]
    return found


async def generate_one(service: Any) -> None:
    call = service.generation.GenerateOne(pb.GenerateOneRequest(start=start()))
    messages = [message async for message in call]
    assert [message.HasField("finished") for message in messages] == [False] * (len(messages) - 1) + [True]


def check(found: list[tuple[int, str, str]], allowed: set[grpc.StatusCode]) -> None:
    assert {code for code, _, _ in found} <= {code.value[0] for code in allowed}
    for code, message, request_id in found:
        assert SECRET not in message
        assert code == 0 or len(request_id) == 26


@pytest.mark.parametrize("seam", SEAMS)
async def test_reliability_figure_3_a_bug_at_any_seam_is_one_status(
    seam, start_service, new_reading, details_of, monkeypatch, caplog
):
    service = await start_service()
    where, name, fault = SEAMS[seam]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fault)
        found = await one_status_each(service, new_reading, details_of)
    check(found, {grpc.StatusCode.INTERNAL, grpc.StatusCode.OK})
    internal = [request_id for code, _, request_id in found if code == grpc.StatusCode.INTERNAL.value[0]]
    assert internal, "the fault was not felt"
    for request_id in internal:
        assert request_id in caplog.text, "the log lacks the id that the caller was told"
    assert service.engine.stats().requests == 0
    reading = await new_reading().read(service.generation.Generate(iter([pb.GenerateRequest(start=start())])))
    assert reading.outcomes[1].finished[0].status.code == 0
    assert service.blocks_in_use == 0


@pytest.mark.parametrize("after", [False, True], ids=["before it is taken", "after it was taken"])
async def test_reliability_figure_3_submit_fails(start_service, new_reading, details_of, after):
    service = await start_service()
    submit = service.engine.submit

    def fail(request):
        if after:
            submit(request)
        raise Fault

    service.engine.submit = fail
    check(await one_status_each(service, new_reading, details_of), {grpc.StatusCode.INTERNAL})
    assert service.engine.stats().requests == 0


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("death", grpc.StatusCode.UNAVAILABLE),
        ("submit", None),
        ("bug", grpc.StatusCode.INTERNAL),
        ("bug in submit", grpc.StatusCode.INTERNAL),
    ],
)
async def test_reliability_figure_3_the_executor_fails(start_service, new_reading, details_of, way, code):
    executor = FailingExecutor(way)  # and so does every worker that replaces it
    service = await start_service(executor, engine=Engine(executor, restart_delay_s=0.001))
    found = await one_status_each(service, new_reading, details_of)
    check(found, {code or grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE})
    assert len(found) == 6


async def test_a_bad_request_does_not_affect_others_on_its_stream(
    start_service, new_reading, byte_tokenizer, monkeypatch
):
    """A fault that one prompt brings about leaves the stream's others whole."""
    encode = byte_tokenizer.encode

    def sometimes(text, *arguments):
        if text == MARK:
            raise Fault
        return encode(text, *arguments)

    monkeypatch.setattr(byte_tokenizer, "encode", sometimes)
    service = await start_service()
    others = [
        pb.GenerationStart(ref=ref, text="hello", sampling=pb.SamplingParams(max_tokens=5)) for ref in range(1, 20)
    ]
    frames = [pb.GenerateRequest(start=one) for one in [*others[:10], start(20), *others[10:]]]
    reading = await new_reading().read(service.generation.Generate(iter(frames)))
    codes = {ref: [end.status.code for end in outcome.finished] for ref, outcome in reading.outcomes.items()}
    assert codes == {20: [grpc.StatusCode.INTERNAL.value[0]]} | {ref: [0] for ref in range(1, 20)}


async def test_a_client_that_leaves_while_a_write_is_blocked(start_service, caplog):
    """Then gRPC raises an error of its own, which is no bug of ours: nothing is logged, everything is freed."""
    service = await start_service()
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(service.target, options=options) as channel:
        call: Any = channel.stream_stream("/penstock.v1.GenerationService/Generate")()
        request = pb.GenerationStart(
            ref=1, text=MARK, sampling=pb.SamplingParams(max_tokens=4000), output=pb.OutputOptions(logprobs=20)
        )
        await call.write(pb.GenerateRequest(start=request).SerializeToString())
        await until(lambda: service.engine.stats().decode_rows >= 2000)
        call.cancel()
        await until(lambda: not service.engine.stats().requests)
    assert service.blocks_in_use == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_named_error_is_no_fault():
    """The seams above raise what nobody expects; a ServiceError is what is expected."""
    assert not issubclass(Fault, ServiceError)
