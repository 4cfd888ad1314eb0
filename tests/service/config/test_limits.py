"""Figure 11: the bounds of every field, by reflection: refused at once, by name, and never reaching the engine."""

import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from bounds.bad_fields import LIMITS, bad_messages, complete, message_types, request_messages, set_field
from bounds.wire_types import good_wire_values
from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.service.config import field_rules as kinds
from penstock.service.config.field_rules import Limit
from penstock.service.config.limits import FIELD_BOUNDS, Validator
from penstock.service.errors import ServiceError

REFUSED_WITHIN_S = 0.010
OPEN = 1
"""The ref of a request whose prompt is open."""


def test_reliability_figure_11_every_field_of_every_request_has_a_bound():
    fields = {name: {field.name for field in descriptor.fields} for name, descriptor in request_messages().items()}
    assert fields == {name: set(bounded) for name, bounded in FIELD_BOUNDS.items()}


def in_an_admin_request(bad: Message, path: str) -> tuple[str, Message, str]:
    """The same for a part of an operator's request."""
    match bad:
        case pb.Settings():
            return "UpdateSettings", pb.UpdateSettingsRequest(settings=bad), f"settings.{path}"
        case pb.TenantSettings():
            settings = pb.Settings(tenants=[bad])
            return "UpdateSettings", pb.UpdateSettingsRequest(settings=settings), f"settings.tenants[0].{path}"
        case pb.RequestFilter():
            return "ListRequests", pb.ListRequestsRequest(filter=bad), f"filter.{path}"
        case pb.RequestIds():
            return "CancelRequests", pb.CancelRequestsRequest(ids=bad), f"ids.{path}"
    raise AssertionError(bad)


def in_a_frame(bad: Any) -> pb.GenerateRequest:
    """The frame that has the message, for a request whose prompt is open."""
    if not isinstance(bad, pb.GenerationCancel):
        bad.ref = OPEN
    name = type(bad).__name__.removeprefix("Generation").lower()
    fields: dict[str, Any] = {name: bad}
    return pb.GenerateRequest(**fields)


PARTS_OF_A_CHAT = {
    "Chat", "ChatMessage", "ToolCall", "Tool", "FunctionTool", "ToolChoice", "ContentPart", "MediaContent"
}  # fmt: skip


def in_a_chat(bad: Any, path: str) -> tuple[pb.Chat, str]:
    """The chat with a part of a conversation, and the path that is to be named."""
    if isinstance(bad, pb.Chat):
        return bad, f"chat.{path}"
    chat = pb.Chat(messages=[bad if isinstance(bad, pb.ChatMessage) else pb.ChatMessage(role="user")])
    match bad:
        case pb.ToolCall():
            chat.messages[0].tool_calls.append(bad)
            return chat, f"chat.messages[0].tool_calls[0].{path}"
        case pb.ContentPart():
            chat.messages[0].content_parts.append(bad)
            return chat, f"chat.messages[0].content_parts[0].{path}"
        case pb.MediaContent():
            chat.messages[0].content_parts.add(image=bad)
            return chat, "chat.messages[0].content_parts[0].image"  # all are refused, so what is wrong is never named
        case pb.Tool():
            chat.tools.append(bad)
            return chat, f"chat.tools[0].{path}"
        case pb.FunctionTool():
            chat.tools.add(function=bad)
            return chat, f"chat.tools[0].function.{path}"
        case pb.ToolChoice():
            chat.tool_choice.CopyFrom(bad)
            return chat, f"chat.tool_choice.{path}"
    return chat, f"chat.messages[0].{path}"


def in_a_request(bad: Message, path: str) -> tuple[str, Any, str]:
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
        case pb.Prediction():
            start.prediction.CopyFrom(bad)
            path = f"prediction.{path}"
        case pb.ResumeFrom():
            start.resume_from.CopyFrom(bad)
            path = f"resume_from.{path}"
        case pb.ReceivedOutput():
            start.resume_from.choices.append(bad)
            path = f"resume_from.choices[0].{path}"
        case pb.StringChoices():
            start.constraint.choices.CopyFrom(bad)
            path = f"constraint.choices.{path}"
        case pb.TokenIds():
            start.token_ids.CopyFrom(bad)
            path = f"token_ids.{path}"
        case _ if type(bad).__name__ in PARTS_OF_A_CHAT:
            complete(bad)
            chat, path = in_a_chat(bad, path)
            start.chat.CopyFrom(chat)
        case pb.Settings() | pb.TenantSettings() | pb.RequestFilter() | pb.RequestIds():
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


async def refused_frame(service: Any, frame: pb.GenerateRequest) -> Any:
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
    elif method in ("Classify", "Score"):
        await getattr(service.classification, method)(request)
    elif method == "Embed":
        await service.embedding.Embed(request).read()
    elif method == "Release":
        await service.generation.Release(request)
    elif method in ("GetModel", "ListModels"):
        await getattr(service.model, method)(request)
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


async def test_a_message_of_more_than_8_mib_ends_its_stream(start_service, new_reading):
    """As the proto says. One of less is refused in band, by its field."""
    service = await start_service()
    start = pb.GenerationStart(ref=1, token_ids=pb.TokenIds(ids=[1] * ((8 << 20) - 100)))
    reading = await new_reading().read(service.generation.Generate(iter([pb.GenerateRequest(start=start)])))
    assert reading.outcomes[1].finished[0].status.message.startswith("token_ids.ids")
    start.token_ids.ids.extend([1] * 200)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await new_reading().read(service.generation.Generate(iter([pb.GenerateRequest(start=start)])))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_metadata_is_refused_by_its_size_and_never_at_random(start_service):
    service = await start_service()
    request = pb.CompleteRequest(start=pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=1)))

    async def outcomes(num_bytes: int) -> set[grpc.StatusCode]:
        found = set()
        for _ in range(3):
            call = service.generation.Complete(request, metadata=(("x", "y" * num_bytes),))
            found.add(await call.code())
        return found

    assert await outcomes(15_000) == {grpc.StatusCode.OK}
    assert await outcomes(17_000) == {grpc.StatusCode.RESOURCE_EXHAUSTED}


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
            case kinds.ServedModel():
                good = [LIMITS.model_name]
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
            case _:
                good = good_wire_values(bound)
        for value in good:
            message = message_types()[name]()
            set_field(message, field_name, value)
            complete(message)
            validator.check(message)


def test_limits_of_the_model_are_what_is_checked():
    assert [LIMITS.resolve(limit) for limit in Limit] == [4095, 4096, 1 << 20]
