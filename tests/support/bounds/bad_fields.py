"""Requests with a value just outside a field's bound, by reflection."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from bounds.wire_types import bad_wire_values
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

import penstock.v1 as pb
from penstock.service.config import field_rules as kinds, limits as bounds
from penstock.service.config.field_rules import ModelLimits
from penstock.service.config.limits import FIELD_BOUNDS
from penstock.v1 import admin_pb2, classification_pb2, embedding_pb2, generation_pb2, model_pb2, tokenizer_pb2

LIMITS = ModelLimits(vocab_size=258, max_model_len=4096, model_name="m")
MODULES = (admin_pb2, classification_pb2, embedding_pb2, generation_pb2, model_pb2, tokenizer_pb2)


def request_messages() -> dict[str, Descriptor]:
    """Every message that a client can send, by walking the methods' input types."""
    found: dict[str, Descriptor] = {}

    def visit(descriptor: Descriptor) -> None:
        if descriptor.name in found or descriptor.GetOptions().map_entry:
            return
        found[descriptor.name] = descriptor
        for field in descriptor.fields:
            if field.message_type is not None and field.message_type.file.package.startswith("penstock."):
                visit(field.message_type)

    for file in MODULES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                visit(method.input_type)
    return found


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
        case bounds.Messages(max_bytes=max_bytes, max_inner=max_inner):
            per_message = 128
            calls = [pb.ToolCall(name="x")] * per_message
            yield [pb.ChatMessage(role="assistant", tool_calls=calls)] * (max_inner // per_message + 1), ""
            parts = [pb.ContentPart(text="x")] * per_message
            yield [pb.ChatMessage(role="user", content_parts=parts)] * (max_inner // per_message + 1), ""
            yield [pb.ChatMessage(role="user")] * (high + 1), ""
            yield [pb.ChatMessage(role="user", content="x" * (max_bytes // 2 + 1))] * 2, ""
            call = pb.ToolCall(name="x", arguments_json="x" * max_bytes)
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
        case kinds.Items() if of_what == "ContentPart":
            yield [pb.ContentPart(text="x")] * (high + 1), ""
            yield [pb.ContentPart(text="x"), pb.ContentPart(image=pb.MediaContent(uri="x"))], "[1].image"
        case kinds.Items() if of_what == "Tool":
            tool = pb.Tool(function=pb.FunctionTool(name="x"))
            yield [tool] * (high + 1), ""
            yield [tool, pb.Tool()], "[1].function"
            yield [tool, pb.Tool(function=pb.FunctionTool(description="x"))], "[1].function.name"
        case kinds.Items() if of_what == "EmbedInput":
            yield [pb.EmbedInput(text="x")] * (high + 1), ""
            long = pb.EmbedInput(token_ids=pb.TokenIds(ids=[0] * (kinds.MAX_UNCUT_IDS + 1)))
            yield [pb.EmbedInput(text="x"), long], "[1].token_ids.ids"
        case kinds.Items() if of_what == "ReceivedOutput":
            yield [pb.ReceivedOutput()] * (high + 1), ""
            yield [pb.ReceivedOutput(), pb.ReceivedOutput(token_ids=[LIMITS.vocab_size])], "[1].token_ids[0]"
        case _:
            yield [pb.TenantSettings(tenant="x")] * (high + 1), ""
            yield [pb.TenantSettings(tenant="x"), pb.TenantSettings(weight=-1)], "[1].weight"


def bad_ids(bound: kinds.NestedIds | kinds.Ids) -> Iterator[tuple[Any, str]]:
    """Ids that are too many, or that no token has."""
    high = int(LIMITS.resolve(bound.high))
    if isinstance(bound, kinds.NestedIds):
        yield pb.TokenIds(ids=[0] * (high + 1)), ".ids"
        return
    yield [0] * (high + 1), ""
    yield [LIMITS.vocab_size], "[0]"
    yield [0, 2**32 - 1], "[1]"
    last = min(high, kinds.MAX_IDS_ON_LOOP) - 1
    yield [0] * last + [LIMITS.vocab_size], f"[{last}]"


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
        case kinds.Data() | kinds.Unsupported():
            yield b"x" * (bound.high + 1) if isinstance(bound, kinds.Data) else pb.MediaContent(), ""
        case kinds.Items(high=high, each=kinds.Text() as each):
            yield ["x"] * (high + 1), ""
            yield [""], "[0]"
            yield ["x", "x" * (each.high + 1)], "[1]"
        case bounds.Messages() | kinds.Texts() | kinds.Items(each=bounds.Nested() | kinds.Known()):
            yield from bad_lists(bound, field.message_type.name if field.message_type is not None else "")
        case kinds.NestedIds() | kinds.Ids():
            yield from bad_ids(bound)
        case kinds.Biases(high=high, most=most):
            yield dict.fromkeys(range(high + 1), 0.0), ""
            yield {LIMITS.vocab_size: 0.0}, f"[{LIMITS.vocab_size}]"
            for value in (math.nan, math.inf, -math.inf, most * 1.01, -most * 1.01):
                yield {3: value}, "[3]"
        case kinds.Refs():
            yield [0] * (bound.high + 1), ""
        case _:
            yield from bad_wire_values(bound)


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
        case pb.RenderChatRequest():
            complete(message.chat)
        case pb.ChatMessage():
            message.role = message.role or "user"
        case pb.ToolCall() | pb.FunctionTool():
            message.name = message.name or "x"
        case pb.Tool() if not message.HasField("function"):
            message.function.name = "x"
        case pb.MediaContent():
            message.mime_type = message.mime_type or "image/png"
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
