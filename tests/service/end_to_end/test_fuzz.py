"""Figure 12, its messages: whatever bytes come, the service neither crashes nor says UNKNOWN or INTERNAL, and goes on.

Half of them are valid by their type and random in their values; the others are such messages broken: bits flipped, cut
off, joined, with fields of another type, with numbers that are too long. They go to every method there is.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from wire.broken_bytes import BREAK
from wire.resumption import resume_randomly, ticket_of

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.v1 import admin_pb2, classification_pb2, embedding_pb2, generation_pb2, model_pb2, tokenizer_pb2

LIMIT_S = 120.0
"""A call that takes longer has been forgotten by the service."""
NUM_AT_ONCE = 16
MAX_FRAMES = 12
VOCAB_SIZE = 258
FILES = (
    generation_pb2,
    classification_pb2,
    embedding_pb2,
    model_pb2,
    tokenizer_pb2,
    admin_pb2,
    health_pb2,
    reflection_pb2,
)
NOT_WATCHED = ("/penstock.v1.GenerationService", "/penstock.v1.EmbeddingService")
"""Their streams end by themselves."""
OURS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
CLIENTS_OWN = "Internal error from Core"
"""What grpc.aio's client says of itself where a stream ends while it writes; what the service said is lost."""

NUMBERS = (0, 1, 2, 3, 7, 16, 63, 127, 128, 257, 258, 2047, 4096, 65535, 2**21, 2**31 - 1, 2**31, 2**32 - 1)
LONG_NUMBERS = (*NUMBERS, 2**53, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1.5, 2.0, 1e-9, 1e-40, 1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "hello",
    "user",
    "<|end|>",
    "\0",
    "\n" * 40,
    "a\u0301" * 20,
    "\U0001f600" * 9,
    "{{ x }}",
    "penstock.v1",
    "../../etc/passwd",
    "x" * 3000,
)


GOOD_TEXTS = {
    "model": "",
    "tenant": "",
    "traceparent": "",
    "continue_from": "",
    "idempotency_key": "",
    "role": "user",
    "service": "penstock.live",
}


class Method(NamedTuple):
    """A method, as a descriptor has it."""

    path: str
    request: Descriptor
    takes_stream: bool
    gives_stream: bool


def methods_of(files: Any) -> list[Method]:
    return [
        Method(
            f"/{service.full_name}/{method.name}", method.input_type, method.client_streaming, method.server_streaming
        )
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


# ------------------------------------------------------------------------------------------------------------- messages


def random_message(rng: random.Random, descriptor: Descriptor, wildness: float, depth: int = 0) -> Message:
    """Valid by its type, and short. Deep fields are rarer. ``wildness`` is the share of values at an edge."""
    message = GetMessageClass(descriptor)()
    share = rng.choice((0.1, 0.3, 0.6, 0.9)) / (1 + depth / 2)
    taken: dict[str, bool] = {}
    for oneof in descriptor.oneofs:
        if len(oneof.fields) > 1:  # one of them, most often the first: a stream needs requests to append to
            one = oneof.fields[0] if rng.random() < 0.4 else rng.choice(oneof.fields)
            taken |= {field.name: field.name == one.name for field in oneof.fields}
    for field in descriptor.fields:
        if not taken.get(field.name, True):
            continue
        wanted = 0.97 if field.name in ("start", "text", *taken) else share
        if rng.random() > wanted or depth > 5:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            for _ in range(rng.choice((1, 3))):
                getattr(message, field.name)[random_value(rng, key, wildness)] = random_value(rng, value, wildness)
        elif field.is_repeated:
            for _ in range(rng.choice((1, 2, 5))):
                if field.message_type is not None:
                    getattr(message, field.name).add().CopyFrom(
                        random_message(rng, field.message_type, wildness, depth + 1)
                    )
                else:
                    getattr(message, field.name).append(random_value(rng, field, wildness))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(random_message(rng, field.message_type, wildness, depth + 1))
        else:
            setattr(message, field.name, random_value(rng, field, wildness))
    return message


def random_value(rng: random.Random, field: FieldDescriptor, wildness: float) -> Any:
    """At an edge of its type, or a small one that is likely to be good."""
    kind, is_wild = field.type, rng.random() < wildness
    if field.enum_type is not None:
        return rng.choice([*(value.number for value in field.enum_type.values), *((99, -1) if is_wild else ())])
    if kind == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(FLOATS) if is_wild else rng.random()
    if kind == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS) if is_wild else GOOD_TEXTS.get(field.name, rng.choice(TEXTS[1:4]))
    if kind == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 32)))
    if not is_wild:
        return rng.randrange(1, 9)
    if kind in (FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64):
        return rng.choice(LONG_NUMBERS)
    if kind in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32):
        return rng.choice(NUMBERS)
    wide = kind in (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64, FieldDescriptor.TYPE_SFIXED64)
    most = 2**63 if wide else 2**31
    return max(-most, min(most - 1, rng.choice(LONG_NUMBERS) * rng.choice((1, -1))))


def random_bytes(rng: random.Random, descriptor: Descriptor, wildness: float) -> bytes:
    """A message, broken the more often the wilder it is."""
    raw = random_message(rng, descriptor, wildness).SerializeToString()
    while rng.random() < wildness:
        raw = rng.choice(BREAK)(rng, raw)
    return raw


def good_starts(rng: random.Random, ticket: bytes) -> list[bytes]:
    """Creates requests that later frames can change and append to. Some have open prompts, some replace another one,
    and some continue that of the ticket. Other refs stay unknown."""
    sampling = pb.SamplingParams(max_tokens=100, ignore_eos=True)
    frames = []
    for ref in (1, 2, 3, 4):
        older = rng.choice((0, 0, 1, 2, 3))
        start = pb.GenerationStart(ref=ref, text="hi", sampling=sampling, open=rng.random() < 0.5, supersedes=older)
        if not start.open and rng.random() < 0.3:
            resume_randomly(rng, start, ticket, VOCAB_SIZE)
        frames += [pb.GenerateRequest(start=start), pb.GenerateRequest(append=pb.GenerationAppend(ref=ref, text="!"))]
    return [frame.SerializeToString() for frame in frames]


# ---------------------------------------------------------------------------------------------------------------- calls


class Fuzzer:
    """Sends messages, and gathers what came of them."""

    def __init__(self, callers: grpc.aio.Channel, admins: grpc.aio.Channel, seed: int) -> None:
        self.callers = callers
        self.admins = admins
        self.ticket = b""
        """What resumes a request for "hi"."""
        self.rng = random.Random(seed)
        self.codes: Counter[str] = Counter()
        self.num_sent = 0
        self.faults: list[str] = []

    async def send(self, num_messages: int, methods: list[Method]) -> None:
        """Some calls at once, until so many messages were sent."""

        async def work() -> None:
            while self.num_sent < num_messages:
                await self.call(self.rng.choice(methods))

        await asyncio.gather(*[work() for _ in range(NUM_AT_ONCE)])

    async def call(self, method: Method) -> None:
        """One call; its answer is read, at least for a while."""
        num_frames = self.rng.randrange(1, MAX_FRAMES) if method.takes_stream else 1
        wildness = self.rng.choice((0.0, 0.02, 0.1, 0.5))
        frames = [random_bytes(self.rng, method.request, wildness) for _ in range(num_frames)]
        if method.path.endswith("/Generate") and self.rng.random() < 0.5:
            frames = [*good_starts(self.rng, self.ticket), *frames]
        self.num_sent += num_frames
        is_watched = method.gives_stream and not method.path.startswith(NOT_WATCHED)
        patience = 0.02 if is_watched else LIMIT_S
        if self.rng.random() < 0.05:
            patience = self.rng.random() * 0.01
        started = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                await self.read(method, frames)
            self.codes["OK"] += 1
        except TimeoutError:
            self.codes["left"] += 1
            if patience == LIMIT_S:
                self.faults.append(f"{method.path} hung: {[frame.hex() for frame in frames]}")
        except grpc.aio.AioRpcError as error:
            self.codes[error.code().name] += 1
            is_ours = error.code() in OURS and error.details() != CLIENTS_OWN
            if is_ours or time.monotonic() - started > LIMIT_S:
                self.faults.append(f"{method.path}: {error.code()} {error.details()}: {[f.hex() for f in frames]}")

    async def read(self, method: Method, frames: list[bytes]) -> None:
        channel: Any = self.admins if "AdminService" in method.path else self.callers
        if method.takes_stream:
            call: Any = channel.stream_stream(method.path)(iter(frames))
        elif method.gives_stream:
            call = channel.unary_stream(method.path)(frames[0])
        else:
            await channel.unary_unary(method.path)(frames[0])
            return
        try:
            async for raw in call:
                if method.path.endswith("/Generate"):
                    self.check_in_band(pb.GenerateResponse.FromString(raw), frames)
            code = await call.code()
            assert code is grpc.StatusCode.OK, code
        finally:
            call.cancel()

    def check_in_band(self, message: pb.GenerateResponse, frames: list[bytes]) -> None:
        """The statuses of a stream's requests are held to the same."""
        self.codes["injected"] += len(message.injected)
        statuses = [ended.status for ended in message.finished] + [refused.status for refused in message.frames_refused]
        for refused in message.frames_refused:
            self.codes[f"refused {pb.FrameKind.Name(refused.frame).removeprefix('FRAME_KIND_')}"] += 1
        for status in statuses:
            self.codes[f"in band {status.code}"] += 1
            if status.code in {code.value[0] for code in OURS}:
                self.faults.append(f"in band: {status.message}: {[frame.hex() for frame in frames]}")


async def fuzz(start_service: Any, caplog: Any, methods: list[Method], num_messages: int, seed: int) -> Fuzzer:
    executor = FakeExecutor(vocab_size=VOCAB_SIZE, max_model_len=128, max_num_seqs=64)
    service = await start_service(executor, SchedulerConfig(max_num_seqs=64), admin_listen="127.0.0.1:0")
    config = service.engine.config
    fuzzer = Fuzzer(service.channel, service.admin_channel, seed)
    sampling = pb.SamplingParams(max_tokens=100, ignore_eos=True)
    fuzzer.ticket = await ticket_of(service, pb.GenerationStart(text="hi", sampling=sampling))
    await fuzzer.send(num_messages, methods)
    assert not fuzzer.faults, "\n".join(fuzzer.faults[:5])
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    async with asyncio.timeout(LIMIT_S):
        # Of calls that the client has left.
        while service.server._running.generation.num_live:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
    assert service.engine.stats().requests == 0
    assert service.blocks_in_use == 0
    # Whatever an operator was made to say, it can be said otherwise.
    await service.admin.Resume(pb.ResumeRequest())
    service.engine.reconfigure(config)
    answer = await service.generation.Complete(pb.CompleteRequest(start=pb.GenerationStart(text="hi")))
    assert answer.finished.status.code == 0
    return fuzzer


def callers_methods() -> list[Method]:
    """Those that bring requests count for more."""
    methods = [method for method in methods_of(FILES) if "AdminService" not in method.path]
    return methods + 3 * [method for method in methods if "GenerationService" in method.path]


@pytest.mark.parametrize("seed", range(3))
async def test_reliability_figure_12_2000_mutated_messages(start_service, caplog, seed):
    fuzzer = await fuzz(start_service, caplog, callers_methods(), 500, seed)
    # Messages of every kind came through: some were good, some were no protobuf, some out of bounds.
    assert {"OK", "INVALID_ARGUMENT", "in band 0", "in band 3"} <= fuzzer.codes.keys()
    # Appends and commits reached live requests, and others had none to reach.
    assert {"refused START", "refused APPEND", "refused COMMIT", "in band 5"} <= fuzzer.codes.keys()
    assert fuzzer.codes["injected"]


async def test_reliability_figure_12_2000_mutated_messages_of_operators_too(start_service, caplog):
    await fuzz(start_service, caplog, methods_of(FILES), 500, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 110))
async def test_reliability_figure_12_100000_mutated_messages(start_service, caplog, seed):
    methods = methods_of(FILES) if seed % 2 else callers_methods()
    fuzzer = await fuzz(start_service, caplog, methods, 10_000, seed)
    print(f"\n{fuzzer.num_sent} messages: {dict(fuzzer.codes.most_common())}")


def every_field(descriptor: Descriptor, seen: set[str]) -> Iterator[str]:
    """The full names of all fields that a message may hold."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        yield field.full_name
        if field.message_type is not None:
            yield from every_field(field.message_type, seen)


def set_fields(message: Message) -> Iterator[str]:
    for field, value in message.ListFields():
        yield field.full_name
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            yield from (inner.full_name for inner in field.message_type.fields)
        else:
            for inner in value if field.is_repeated else (value,):
                yield from set_fields(inner)


def test_random_messages_have_every_field():
    rng = random.Random(0)
    found: set[str] = set()
    for method in methods_of(FILES):
        for _ in range(300):
            found |= set(set_fields(random_message(rng, method.request, 0.5)))
    seen: set[str] = set()
    wanted = {name for method in methods_of(FILES) for name in every_field(method.request, seen)}
    assert found == wanted
