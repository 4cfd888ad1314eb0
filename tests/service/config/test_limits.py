"""Figure 11: the bounds of every field, by reflection: refused at once, by name, and never reaching the engine."""

import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.service.config import field_rules as kinds, limits as bounds
from penstock.service.config.field_rules import Limit, ModelLimits
from penstock.service.config.limits import FIELD_BOUNDS, Validator
from penstock.service.errors import ServiceError
from penstock.v1 import admin_pb2, classification_pb2, embedding_pb2, generation_pb2, model_pb2, tokenizer_pb2

LIMITS = ModelLimits(vocab_size=258, max_model_len=4096)
REFUSED_WITHIN_S = 0.010
OPEN = 1
"""The ref of a request whose prompt is open."""
MODULES = (admin_pb2, classification_pb2, embedding_pb2, generation_pb2, model_pb2, tokenizer_pb2)


def request_messages() -> dict[str, Descriptor]:
    """Every message that a client can send, by walking the methods' input types."""
    found: dict[str, Descriptor] = {}

    def visit(descriptor: Descriptor) -> None:
        if descriptor.name in found or descriptor.GetOptions().map_entry:
            return
        found[descriptor.name] = descriptor
        for field in descriptor.fields:
            if field.message_type is not None:
                visit(field.message_type)

    for file in MODULES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                visit(method.input_type)
    return found


def test_reliability_figure_11_every_field_of_every_request_has_a_bound():
    fields = {name: {field.name for field in descriptor.fields} for name, descriptor in request_messages().items()}
    assert fields == {name: set(bounded) for name, bounded in FIELD_BOUNDS.items()}


def bad_numbers(bound: kinds.Number, field: FieldDescriptor) -> Iterator[float]:
    """Numbers just outside a bound, where the field's type has room for them."""
    low, high = bound.low, LIMITS.resolve(bound.high)
    is_float = field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)
    if low >= 1 or is_float or field.type == FieldDescriptor.TYPE_SINT32:
        yield low - 1
    if is_float:
        yield from (math.nan, math.inf, -math.inf, low - 1e-3, high * 1.001 + 1e-3)
    if high < (bounds.INT64_MAX if field.type == FieldDescriptor.TYPE_INT64 else bounds.UINT32_MAX):
        yield high + 1


def bad_lists(bound: Any, of_what: str) -> Iterator[tuple[Any, str]]:
    """Lists that are too long, in items or in bytes, or have an item that is out of its own bounds."""
    high = bound.high
    match bound:
        case bounds.Messages(max_bytes=max_bytes, max_calls=max_calls):
            per_message = 128
            calls = [pb.ToolCall(name="x")] * per_message
            yield [pb.ChatMessage(role="assistant", tool_calls=calls)] * (max_calls // per_message + 1), ""
            yield [pb.ChatMessage(role="user")] * (high + 1), ""
            yield [pb.ChatMessage(role="user", content="x" * (max_bytes // 2 + 1))] * 2, ""
            call = pb.ToolCall(name="x", arguments="x" * max_bytes)
            yield [pb.ChatMessage(role="assistant", content="x", tool_calls=[call])], ""
            yield [pb.ChatMessage(role="user"), pb.ChatMessage(content="x")], "[1].role"
        case kinds.Texts(max_bytes=max_bytes):
            yield ["x"] * (high + 1), ""
            yield ["x", ""], "[1]"
            yield ["x" * (max_bytes // 2 + 1)] * 2, ""
        case kinds.Items(each=kinds.Known(numbers=numbers)):
            yield [min(numbers)] * (high + 1), ""
            yield [min(numbers), max(numbers) + 1], "[1]"
            yield [0], "[0]"
        case kinds.Items() if of_what == "ToolCall":
            yield [pb.ToolCall(name="x")] * (high + 1), ""
            yield [pb.ToolCall(name="x"), pb.ToolCall(id="x")], "[1].name"
        case kinds.Items() if of_what == "EmbedInput":
            yield [pb.EmbedInput(text="x")] * (high + 1), ""
            long = pb.EmbedInput(token_ids=pb.TokenIds(ids=[0] * (kinds.MAX_UNCUT_IDS + 1)))
            yield [pb.EmbedInput(text="x"), long], "[1].token_ids.ids"
        case _:
            yield [pb.TenantSettings(tenant="x")] * (high + 1), ""
            yield [pb.TenantSettings(tenant="x"), pb.TenantSettings(weight=-1)], "[1].weight"


def bad_values(bound: Any, field: FieldDescriptor) -> Iterator[tuple[Any, str]]:
    """Values just outside a bound, each with what is added to the field's path."""
    match bound:
        case kinds.Number():
            yield from ((value, "") for value in bad_numbers(bound, field))
        case kinds.Text(high=high):
            yield "x" * (high + 1), ""
            if bound.low > 1:
                yield "x", ""
            if bound.pattern is not None:
                yield "\n" * max(bound.low, 1), ""
        case kinds.Known(numbers=numbers):
            yield max(numbers) + 1, ""
        case kinds.Items(high=high, each=kinds.Text() as each):
            yield ["x"] * (high + 1), ""
            yield [""], "[0]"
            yield ["x", "x" * (each.high + 1)], "[1]"
        case bounds.Messages() | kinds.Texts() | kinds.Items(each=bounds.Nested() | kinds.Known()):
            yield from bad_lists(bound, field.message_type.name if field.message_type is not None else "")
        case kinds.NestedIds(high=high):
            yield pb.TokenIds(ids=[0] * (int(LIMITS.resolve(high)) + 1)), ".ids"
        case kinds.Ids(high=high):
            high = int(LIMITS.resolve(high))
            yield [0] * (high + 1), ""
            yield [LIMITS.vocab_size], "[0]"
            yield [0, 2**32 - 1], "[1]"
            last = min(high, kinds.MAX_IDS_ON_LOOP) - 1
            yield [0] * last + [LIMITS.vocab_size], f"[{last}]"
        case kinds.Biases(high=high, most=most):
            yield dict.fromkeys(range(high + 1), 0.0), ""
            yield {LIMITS.vocab_size: 0.0}, f"[{LIMITS.vocab_size}]"
            for value in (math.nan, math.inf, -math.inf, most * 1.01, -most * 1.01):
                yield {3: value}, "[3]"
        case kinds.Refs(high=high):
            yield [0] * (high + 1), ""
        case _ if type(bound) in (kinds.Bound, bounds.Nested):
            pass
        case _:
            raise AssertionError(f"no bad values for {bound}")


def set_field(message: Any, name: str, value: Any) -> None:
    field = getattr(message, name)
    if isinstance(value, list):
        field.extend(value)
    elif isinstance(value, Message):
        field.CopyFrom(value)
    elif isinstance(value, dict):
        for key, entry in value.items():
            field[key] = entry
    else:
        setattr(message, name, int(value) if isinstance(field, int) and not isinstance(value, str) else value)


def complete(message: Any) -> None:
    """Sets what a part of a conversation needs besides the field that is tried."""
    match message:
        case pb.Chat() if not message.messages:
            message.messages.add(role="user")
        case pb.ChatMessage():
            message.role = message.role or "user"
        case pb.ToolCall():
            message.name = message.name or "x"
        case pb.EmbedRequest() | pb.ClassifyRequest() if not message.inputs:
            message.inputs.add(text="x")
        case pb.ScoreRequest():
            for texts in (message.queries, message.documents):
                texts.extend([] if texts else ["x"])


def message_types() -> dict[str, Any]:
    return {name: getattr(pb, name) for name in FIELD_BOUNDS}


def bad_messages() -> Iterator[Any]:
    descriptors, types = request_messages(), message_types()
    for name, fields in FIELD_BOUNDS.items():
        for field_name, bound in fields.items():
            for number, (value, at) in enumerate(bad_values(bound, descriptors[name].fields_by_name[field_name])):
                message = types[name]()
                set_field(message, field_name, value)
                yield pytest.param(message, f"{field_name}{at}", id=f"{name}.{field_name}-{number}")


def in_an_admin_request(bad: Message, path: str) -> tuple[str, Message, str]:
    """The same for a part of an operator's request."""
    match bad:
        case pb.TenantSettings():
            return "UpdateSettings", pb.UpdateSettingsRequest(tenants=[bad]), f"tenants[0].{path}"
        case pb.RequestFilter():
            return "ListRequests", pb.ListRequestsRequest(filter=bad), f"filter.{path}"
        case pb.RequestIds():
            return "CancelRequests", pb.CancelRequestsRequest(ids=bad), f"ids.{path}"
    raise AssertionError(bad)


def in_a_frame(bad: Any) -> pb.GenerateRequest:
    """A frame of a stream, for the request whose prompt is open."""
    if not isinstance(bad, pb.GenerationCancel):
        bad.ref = OPEN
    return pb.GenerateRequest(**{type(bad).__name__.removeprefix("Generation").lower(): bad})


def in_a_request(bad: Message, path: str) -> tuple[str, Message, str]:
    """The method that the message can be sent by, what is sent, and the path that is to be named."""
    start = pb.GenerationStart(text="hi")
    match bad:
        case pb.GenerationStart():
            start.MergeFrom(bad)
        case pb.SamplingParams() | pb.OutputOptions():
            name = {"SamplingParams": "sampling", "OutputOptions": "output"}[type(bad).__name__]
            getattr(start, name).CopyFrom(bad)
            path = f"{name}.{path}"
        case pb.Constraint():
            start.constraint.CopyFrom(bad)
            path = f"constraint.{path}"
        case pb.StringChoices():
            start.constraint.choices.CopyFrom(bad)
            path = f"constraint.choices.{path}"
        case pb.TokenIds():
            start.token_ids.CopyFrom(bad)
            path = f"token_ids.{path}"
        case pb.Chat():
            start.chat.CopyFrom(bad)
            path = f"chat.{path}"
        case pb.ChatMessage():
            complete(bad)
            start.chat.messages.append(bad)
            path = f"chat.messages[0].{path}"
        case pb.ToolCall():
            complete(bad)
            start.chat.messages.add(role="assistant", tool_calls=[bad])
            path = f"chat.messages[0].tool_calls[0].{path}"
        case pb.TenantSettings() | pb.RequestFilter() | pb.RequestIds():
            return in_an_admin_request(bad, path)
        case pb.EmbedInput():
            return "Embed", pb.EmbedRequest(inputs=[bad]), f"inputs[0].{path}"
        case pb.EmbedRequest() | pb.ClassifyRequest() | pb.ScoreRequest():
            complete(bad)
            return type(bad).__name__.removesuffix("Request"), bad, path
        case pb.GenerationCancel() | pb.GenerationUpdate() | pb.GenerationAppend() | pb.GenerationCommit():
            return "Generate", in_a_frame(bad), path
        case _:
            return type(bad).__name__.removesuffix("Request"), bad, path
    return "GenerateOne", pb.GenerateOneRequest(start=start), path


def check(validator: Validator, message: Message, ids: Any, field: str) -> None:
    """As the service does it: the values of long lists come second."""
    validator.check(message)
    validator.check_ids(ids, field)


async def refused_frame(service: Any, frame: Any) -> Any:
    """The status of a frame that is refused on a stream, whose live request goes on."""
    start = pb.GenerateRequest(start=pb.GenerationStart(ref=OPEN, open=True))
    call = service.generation.Generate()
    for each in (start, frame):
        await call.write(each)
    message = await call.read()
    assert not message.finished
    [refused] = message.frames_refused
    kind = pb.FrameKind.Name(refused.frame).removeprefix("FRAME_KIND_").lower()
    assert kind == frame.WhichOneof("frame")
    assert refused.ref == (0 if kind == "cancel" else OPEN)
    call.cancel()
    return refused.status


async def send(service: Any, method: str, request: Any) -> None:
    """A call, to its end."""
    if method == "GenerateOne":
        await service.generation.GenerateOne(request).read()
    elif method in ("Classify", "Embed", "Score"):
        stub = service.embedding if method == "Embed" else service.classification
        await getattr(stub, method)(request)
    elif method == "GetModel":
        await service.model.GetModel(request)
    elif hasattr(service.admin, method):
        call = getattr(service.admin, method)(request)
        await (call.read() if method.startswith("Watch") else call)
    else:
        await getattr(service.tokenizer, method)(request)


@pytest.mark.parametrize(("bad", "path"), list(bad_messages()))
def test_reliability_figure_11_validator_refuses_at_once(bad, path):
    """By itself: what it costs the loop, too, in time of the processor, which other programs do not change."""
    validator = Validator(LIMITS)
    complete(bad)
    field = path.partition("[")[0]
    ids = getattr(bad, field) if isinstance(FIELD_BOUNDS[type(bad).__name__].get(field), kinds.Ids) else []
    seconds = math.inf
    for _ in range(3):
        started = time.thread_time()
        with pytest.raises(ServiceError) as error:
            check(validator, bad, ids, field)
        seconds = min(seconds, time.thread_time() - started)
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.field == path
    assert len(error.value.message) < 300
    if len(ids) <= kinds.MAX_IDS_ON_LOOP:  # the values of longer lists are looked at off the loop
        assert seconds < REFUSED_WITHIN_S


async def test_reliability_figure_11_no_bad_field_reaches_the_engine(start_service, details_of, monkeypatch):
    """Over a socket: each refusal names the field, and the engine hears of none."""
    service = await start_service(admin_listen="127.0.0.1:0")
    monkeypatch.setattr(service.engine, "reconfigure", lambda config: pytest.fail("a bad request reached the engine"))
    monkeypatch.setattr(service.engine, "submit", lambda request: pytest.fail("a bad request reached the engine"))
    for parameters in bad_messages():
        bad, path = parameters.values
        method, request, path = in_a_request(bad, path)
        if method == "Generate":
            refusal = await refused_frame(service, request)
            assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], parameters.id
        else:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await send(service, method, request)
            refusal = error.value
            assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT, parameters.id
        [violation] = details_of(refusal)["BadRequest"].field_violations
        assert violation.field == path, parameters.id
    assert service.engine.stats().steps == 0


def test_a_penalty_is_not_so_small_that_logits_overflow():
    validator = Validator(LIMITS)
    for value in (1e-38, 0.0099):
        with pytest.raises(ServiceError) as error:
            validator.check(pb.GenerationStart(sampling=pb.SamplingParams(repetition_penalty=value)))
        assert "must be at least 0.01 and at most 100" in error.value.message
    validator.check(pb.GenerationStart(sampling=pb.SamplingParams(repetition_penalty=0.01)))


class Unread(list[int]):
    """Too many to be looked at on the event loop."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("they were looked at")


def test_ids_of_thousands_of_inputs_are_only_counted():
    """All of them together may be millions; their values are looked at where the inputs are prepared."""
    bound = FIELD_BOUNDS["EmbedInput"]["token_ids"]
    assert bound.problem(SimpleNamespace(ids=Unread([LIMITS.vocab_size] * 4096)), LIMITS) is None
    assert bound.problem(SimpleNamespace(ids=Unread([0] * (kinds.MAX_UNCUT_IDS + 1))), LIMITS) is not None


def test_a_fixed_length_is_not_reported_as_a_range():
    with pytest.raises(ServiceError) as error:
        Validator(LIMITS).check(pb.GenerationStart(traceparent="00-"))
    assert error.value.message == "traceparent: must be 55 bytes long; it has 3"


@pytest.mark.parametrize("name", list(FIELD_BOUNDS))
def test_the_bounds_themselves_are_allowed(name):
    """A bound that refuses everything would pass the other tests."""
    validator = Validator(LIMITS)
    for field_name, bound in FIELD_BOUNDS[name].items():
        good: list[Any] = []
        match bound:
            case kinds.Number(low=low, high=high):
                good = [LIMITS.resolve(high), low]
            case kinds.Text(low=low, high=high) if bound.pattern is None:
                good = ["x" * low, "x" * high]
            case kinds.Known(numbers=numbers):
                good = list(numbers)
            case kinds.Items(each=kinds.Known(numbers=numbers)):
                good = [list(numbers)]
            case kinds.Items(high=high, each=kinds.Text() as each):
                good = [["x" * each.high] * high]
            case kinds.Texts(high=high, max_bytes=max_bytes):
                good = [["x"] * high, ["x" * max_bytes]]
            case kinds.Ids(high=high):
                good = [[LIMITS.vocab_size - 1] * int(LIMITS.resolve(high))]
            case kinds.NestedIds(high=high):
                good = [pb.TokenIds(ids=[LIMITS.vocab_size - 1] * int(LIMITS.resolve(high)))]
            case kinds.Biases(most=most):
                good = [dict.fromkeys(range(LIMITS.vocab_size), most), {0: -most}]
            case kinds.Refs(high=high):
                good = [[2**32 - 1] * high]
        for value in good:
            message = message_types()[name]()
            set_field(message, field_name, value)
            complete(message)
            validator.check(message)


def test_limits_of_the_model_are_what_is_checked():
    assert [LIMITS.resolve(limit) for limit in Limit] == [4095, 4096, 1 << 20]
