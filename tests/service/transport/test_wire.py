"""What would take long to parse is refused before it is."""

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor

import penstock.v1 as pb
from penstock.service.config.limits import FIELD_BOUNDS
from penstock.service.errors import Reason, ServiceError
from penstock.service.transport import message_size as wire
from penstock.service.transport.message_size import MAX_MAP_ENTRIES, MAX_PARTS, check_parts

MIB = 1 << 20
EMBED, RENDER = pb.EmbedRequest.DESCRIPTOR, pb.RenderChatRequest.DESCRIPTOR
INPUTS, CHAT = pb.EmbedRequest.INPUTS_FIELD_NUMBER, pb.RenderChatRequest.CHAT_FIELD_NUMBER


def inside(number, content):
    """A field of bytes, or a message."""
    length, encoded = len(content), b""
    while length >= 0x80:
        encoded += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([number << 3 | 2]) + encoded + bytes([length]) + content


EMPTY_PARTS = {
    "inputs": (EMBED, inside(INPUTS, b"") * (3 * MIB)),
    "empty texts": (EMBED, inside(INPUTS, inside(1, b"")) * MIB),
    "parts of one input": (EMBED, inside(INPUTS, inside(2, b"") * (3 * MIB))),
    "numbers one by one": (EMBED, inside(INPUTS, inside(2, b"\x08\x01" * (3 * MIB)))),
    "unknown fields": (EMBED, inside(15, b"") * (3 * MIB)),
    "behind a group": (EMBED, b"\x0b\x10\x01\x0c" + inside(INPUTS, b"") * (3 * MIB)),
    "messages": (RENDER, inside(CHAT, inside(1, b"") * (3 * MIB))),
    "calls": (RENDER, inside(CHAT, inside(1, inside(3, b"") * (3 * MIB)))),
}


class Looked(bytes):
    """Counts how many of them are looked at."""

    num_looks = 0

    def __getitem__(self, at):
        self.num_looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("name", EMPTY_PARTS)
async def test_millions_of_parts_are_not_counted_to_the_end(name):
    message, content = EMPTY_PARTS[name]
    raw = Looked(content)
    with pytest.raises(ServiceError) as error:
        await check_parts(raw, message)
    assert raw.num_looks < 2 * MAX_PARTS + 100
    assert error.value.reason is Reason.TOO_EXPENSIVE
    assert "40,000" in error.value.message


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * MIB,
        b"\x10" + b"\xff" * MIB,
        inside(INPUTS, inside(1, b"x" * MIB))[:-1],
        inside(INPUTS, inside(1, b"x" * MIB)[:-1]),
        b"\x09" * (MIB // 4),
        b"\x0b" * 30_000 + inside(INPUTS, inside(1, b"x" * MIB)),
    ],
    ids=["no tag", "no number", "breaks off", "breaks off inside", "fixed", "groups"],
)
async def test_what_is_no_message_is_left_to_the_parser(raw):
    await check_parts(raw, EMBED)


async def test_the_largest_chat_is_taken():
    message = pb.ChatMessage(role="assistant", content="x" * 500, tool_call_id="i", name="n")
    message.tool_calls.add(id="i", name="n", arguments_json="{}")
    tool = pb.Tool(function=pb.FunctionTool(name="f", description="d", parameters_json="{}"))
    chat = pb.Chat(
        messages=[message] * 4096, tools=[tool] * 128, template_variables_json="{}", add_generation_prompt=True
    )
    await check_parts(pb.RenderChatRequest(chat=chat).SerializeToString(), RENDER)


async def test_long_texts_and_packed_ids_are_one_part_each():
    start = pb.GenerationStart(text="x" * (4 * MIB))
    await check_parts(pb.GenerateRequest(start=start).SerializeToString(), pb.GenerateRequest.DESCRIPTOR)
    ids = pb.EmbedInput(token_ids=pb.TokenIds(ids=[300] * MIB))
    await check_parts(pb.EmbedRequest(inputs=[ids]).SerializeToString(), EMBED)


async def test_the_bound_itself_is_allowed():
    raw = inside(INPUTS, inside(1, b"xx")) * (MAX_PARTS // 2)
    await check_parts(raw, EMBED)
    with pytest.raises(ServiceError):
        await check_parts(raw + inside(INPUTS, b""), EMBED)


@pytest.mark.parametrize("method", ["EmbeddingService/Embed", "GenerationService/Complete"])
async def test_a_call_is_refused_before_it_is_parsed(start_service, details_of, method):
    service = await start_service()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.channel.unary_unary(f"/penstock.v1.{method}")(inside(1, b"") * (3 * MIB))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error.value)["ErrorInfo"].reason == "TOO_EXPENSIVE"


START = 1
"""The number of ``start`` in all of them."""


def biases(num_entries: int, tag: bytes = b"\x72") -> bytes:
    """Entries of ``logit_bias`` whose keys collide in protobuf's table."""
    entries = (pb.SamplingParams(logit_bias={(number << 16) & 0xFFFFFFFF: 1.0}) for number in range(num_entries))
    return b"".join(tag + entry.SerializeToString()[1:] for entry in entries)


def started(sampling: bytes) -> bytes:
    """The fields of a ``GenerationStart`` with it, in the messages that begin a request."""
    number = pb.GenerationStart.DESCRIPTOR.fields_by_name["sampling"].number
    return bytes(inside(START, inside(number, sampling)))


WITH_BIASES = (pb.CompleteRequest, pb.GenerateOneRequest, pb.GenerateRequest)
MANY_ENTRIES = {
    "one map": started(biases(MAX_MAP_ENTRIES + 1)),
    "the same key": started(b"\x72\x00" * (MAX_MAP_ENTRIES + 1)),
    "parts that are merged": started(biases(MAX_MAP_ENTRIES)) + started(biases(1)),
    "tags that are too long": started(biases(MAX_MAP_ENTRIES + 1, tag=b"\xf2\x00")),
    "160 KiB": started(biases(13_000)),
    "beside a text": inside(START, inside(2, b"a word or more " * 1000)) + started(biases(MAX_MAP_ENTRIES + 1)),
}


@pytest.mark.parametrize("message", WITH_BIASES)
@pytest.mark.parametrize("name", MANY_ENTRIES)
async def test_a_map_with_too_many_entries_is_refused_before_it_is_built(message, name):
    raw = Looked(MANY_ENTRIES[name])
    with pytest.raises(ServiceError) as error:
        await check_parts(raw, message.DESCRIPTOR)
    assert raw.num_looks < 6 * MAX_MAP_ENTRIES
    assert error.value.reason is Reason.TOO_EXPENSIVE
    assert error.value.field == "sampling.logit_bias"
    assert "1,024 entries" in error.value.message


@pytest.mark.parametrize("message", WITH_BIASES)
async def test_a_map_that_is_a_little_too_large_is_left_to_the_validator(message):
    """So that its request is refused alone, and not the stream that it comes by."""
    await check_parts(started(biases(MAX_MAP_ENTRIES)), message.DESCRIPTOR)


async def test_a_short_message_without_a_map_is_not_looked_at():
    raw = Looked(inside(1, b"r" * 60_000))
    await check_parts(raw, EMBED)
    raw = Looked(inside(START, inside(2, b"x" * 60_000)))
    await check_parts(raw, pb.GenerateRequest.DESCRIPTOR)
    assert not raw.num_looks


def maps_of_the_contract() -> set[tuple[str, str]]:
    """(message, field), of all that the contract's messages have."""
    found = set()
    for name in FIELD_BOUNDS:
        fields = getattr(pb, name).DESCRIPTOR.fields
        found |= {(name, each.name) for each in fields if each.message_type and is_entry(each.message_type)}
    return found


def is_entry(message: Descriptor) -> bool:
    return bool(message.GetOptions().map_entry)


def test_no_map_of_the_contract_may_have_as_many():
    maps = maps_of_the_contract()
    assert ("SamplingParams", "logit_bias") in maps
    assert all(getattr(FIELD_BOUNDS[message][field], "high") < MAX_MAP_ENTRIES for message, field in maps)  # noqa: B009 - of its kind


def test_maps_are_found_wherever_they_are():
    """In a message of a message, in a map's own values, and in a message that holds itself."""
    file = descriptor_pb2.FileDescriptorProto(name="nested.proto", package="nested", syntax="proto3")
    inner, outer = file.message_type.add(name="Inner"), file.message_type.add(name="Outer")
    for message, value in ((inner, None), (outer, ".nested.Inner")):
        entry = message.nested_type.add(name="MEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
        entry.field.add(name="key", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
        kind = "TYPE_STRING" if value is None else "TYPE_MESSAGE"
        entry.field.add(name="value", number=2, type=kind, type_name=value, label="LABEL_OPTIONAL")
        path = f".nested.{message.name}.MEntry"
        message.field.add(name="m", number=40, type="TYPE_MESSAGE", type_name=path, label="LABEL_REPEATED")
    outer.field.add(name="again", number=3, type="TYPE_MESSAGE", type_name=".nested.Outer", label="LABEL_REPEATED")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = wire._maps_in(pool.FindMessageTypeByName("nested.Outer"))
    assert set(found.values()) == {"m", "m.value.m"}


async def test_the_event_loop_turns_while_parts_are_counted():
    counting = asyncio.ensure_future(check_parts(inside(INPUTS, inside(1, b"xx")) * (MAX_PARTS // 2), EMBED))
    turns = 0
    while not counting.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 5


async def test_a_call_with_a_map_of_colliding_keys_is_refused_by_its_field(start_service, details_of):
    service = await start_service()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.channel.unary_unary("/penstock.v1.GenerationService/Complete")(MANY_ENTRIES["160 KiB"])
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error.value)["BadRequest"].field_violations[0].field == "sampling.logit_bias"


async def test_a_message_of_a_stream_is_refused_before_it_is_parsed(start_service, details_of):
    service = await start_service()
    call = service.channel.stream_stream("/penstock.v1.GenerationService/Generate")(iter([inside(1, b"") * (3 * MIB)]))
    [refused] = pb.GenerateResponse.FromString(await call.read()).frames_refused
    assert details_of(refused.status)["ErrorInfo"].reason == "TOO_EXPENSIVE"
