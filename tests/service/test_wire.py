"""What would take long to parse is refused before it is."""

import grpc
import pytest

from penstock.service.errors import Reason, ServiceError
from penstock.service.wire import MAX_PARTS, check_parts
from penstock.v1 import embedding_pb2, generation_pb2 as pb, tokenizer_pb2

MIB = 1 << 20
EMBED, RENDER = embedding_pb2.EmbedRequest.DESCRIPTOR, tokenizer_pb2.RenderChatRequest.DESCRIPTOR


def inside(number, content):
    """A field of bytes, or a message."""
    length, encoded = len(content), b""
    while length >= 0x80:
        encoded += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([number << 3 | 2]) + encoded + bytes([length]) + content


EMPTY_PARTS = {
    "inputs": (EMBED, inside(1, b"") * (3 * MIB)),
    "empty texts": (EMBED, inside(1, inside(1, b"")) * MIB),
    "parts of one input": (EMBED, inside(1, inside(2, b"") * (3 * MIB))),
    "numbers one by one": (EMBED, inside(1, inside(2, b"\x08\x01" * (3 * MIB)))),
    "unknown fields": (EMBED, inside(15, b"") * (3 * MIB)),
    "behind a group": (EMBED, b"\x0b\x10\x01\x0c" + inside(1, b"") * (3 * MIB)),
    "messages": (RENDER, inside(1, inside(1, b"") * (3 * MIB))),
    "calls": (RENDER, inside(1, inside(1, inside(3, b"") * (3 * MIB)))),
}


class Looked(bytes):
    """Counts how many of them are looked at."""

    num_looks = 0

    def __getitem__(self, at):
        self.num_looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("name", EMPTY_PARTS)
def test_millions_of_parts_are_not_counted_to_the_end(name):
    message, content = EMPTY_PARTS[name]
    raw = Looked(content)
    with pytest.raises(ServiceError) as error:
        check_parts(raw, message)
    assert raw.num_looks < 2 * MAX_PARTS + 100
    assert error.value.reason is Reason.TOO_EXPENSIVE
    assert "40,000" in error.value.message


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * MIB,
        b"\x10" + b"\xff" * MIB,
        inside(1, inside(1, b"x" * MIB))[:-1],
        inside(1, inside(1, b"x" * MIB)[:-1]),
        b"\x09" * (MIB // 4),
        b"\x0b" * 30_000 + inside(1, inside(1, b"x" * MIB)),
    ],
    ids=["no tag", "no number", "breaks off", "breaks off inside", "fixed", "groups"],
)
def test_what_is_no_message_is_left_to_the_parser(raw):
    check_parts(raw, EMBED)


def test_the_largest_chat_is_taken():
    message = pb.ChatMessage(role="assistant", content="x" * 500, tool_call_id="i", name="n")
    message.tool_calls.add(id="i", name="n", arguments="{}")
    chat = pb.Chat(messages=[message] * 4096, tools=["{}"] * 128, template_variables="{}", add_generation_prompt=True)
    check_parts(tokenizer_pb2.RenderChatRequest(chat=chat).SerializeToString(), RENDER)


def test_long_texts_and_packed_ids_are_one_part_each():
    start = pb.Start(text="x" * (4 * MIB))
    check_parts(pb.GenerateRequest(start=start).SerializeToString(), pb.GenerateRequest.DESCRIPTOR)
    ids = embedding_pb2.EmbedInput(token_ids=pb.TokenIds(ids=[300] * MIB))
    check_parts(embedding_pb2.EmbedRequest(inputs=[ids]).SerializeToString(), EMBED)


def test_the_bound_itself_is_allowed():
    raw = inside(1, inside(1, b"xx")) * (MAX_PARTS // 2)
    check_parts(raw, EMBED)
    with pytest.raises(ServiceError):
        check_parts(raw + inside(1, b""), EMBED)


@pytest.mark.parametrize("method", ["EmbeddingService/Embed", "GenerationService/Complete"])
async def test_a_call_is_refused_before_it_is_parsed(start_service, details_of, method):
    service = await start_service()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.channel.unary_unary(f"/penstock.v1.{method}")(inside(1, b"") * (3 * MIB))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error.value)["ErrorInfo"].reason == "TOO_EXPENSIVE"


async def test_a_message_of_a_stream_is_refused_before_it_is_parsed(start_service, details_of):
    service = await start_service()
    call = service.channel.stream_stream("/penstock.v1.GenerationService/Generate")(iter([inside(1, b"") * (3 * MIB)]))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert details_of(error.value)["ErrorInfo"].reason == "TOO_EXPENSIVE"
