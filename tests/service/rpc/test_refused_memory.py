"""What is refused leaves nothing behind, without the cycle collector's help: bodies as large as they may be, refused
for each reason, by every method."""

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, groupby
from operator import itemgetter
from typing import Any

import grpc
import pytest
import tokenizers
from memory import grown_bytes, held_bytes_counter
from tokenizers import normalizers
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.service.auth.identity import ACCESS, Principal
from penstock.service.errors import Reason, ServiceError
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.transport.call_limits import MAX_MESSAGE_BYTES

MIB = 1 << 20
MOST_BYTES = 64 << 10
"""That each may leave behind."""
MOST_OBJECTS = 40
"""Small ones of gRPC's, on both sides. A traceback with its frames would be 60 more."""
BUFFER_BYTES = 8 * MIB
"""What gRPC keeps for a connection on which large messages came, more or less."""
TEXT = "x y " * (MIB - 64)
GENERATION = "/penstock.v1.GenerationService"


class Keys:
    """A key is its tenant's name; an operator's begins with ``ops``."""

    def authenticate(self, metadata: Any) -> Principal:
        key = dict(metadata).get("authorization")
        if key is None:
            raise ServiceError(Reason.UNAUTHENTICATED)
        return Principal(key, may_administer=key.startswith("ops"))


def chat(**fields: Any) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=TEXT)], **fields)


def start(**fields: Any) -> pb.GenerationStart:
    return pb.GenerationStart(**({"text": TEXT} | fields))


def cut(**fields: Any) -> pb.GenerationStart:
    """Its prompt is cut, and so not too long."""
    return pb.GenerationStart(token_ids=pb.TokenIds(ids=[1] * MIB), truncate_prompt_tokens=8, **fields)


REFUSED: dict[str, tuple[str, pb.GenerationStart, str]] = {
    "a text that is too long": ("any", start(), "tokens; it has"),
    "a chat that is too long": ("any", pb.GenerationStart(chat=chat()), "tokens; it has"),
    "too many ids": ("any", pb.GenerationStart(token_ids=pb.TokenIds(ids=[1] * MIB)), "token_ids.ids"),
    "a field out of bounds": ("any", start(sampling=pb.SamplingParams(temperature=1000)), "temperature"),
    "an unknown role": (
        "any",
        pb.GenerationStart(chat=pb.Chat(messages=[pb.ChatMessage(role="x", content=TEXT)])),
        "role",
    ),
    "variables that are no JSON": (
        "any",
        pb.GenerationStart(chat=chat(template_variables_json="[")),
        "template_variables_json",
    ),
    "a template that refuses": (
        "any",
        pb.GenerationStart(chat=chat(template_variables_json='{"refuse": 1}')),
        "refuses it",
    ),
    "variables that the template fails on": (
        "any",
        pb.GenerationStart(chat=chat(template_variables_json='{"fail": 1}')),
        "fails",
    ),
    "tools that are no JSON": (
        "any",
        pb.GenerationStart(
            chat=pb.Chat(
                messages=[pb.ChatMessage(role="user", content="x")],
                tools=[pb.Tool(function=pb.FunctionTool(name="f", parameters_json="[" + TEXT))],
            )
        ),
        "chat.tools",
    ),
    "a constraint that is none": (
        "any",
        cut(constraint=pb.Constraint(regex="(")),
        "constraint",
    ),
    "another tenant": ("any", start(tenant="other"), "tenant"),
    "no context": ("any", cut(continue_from="nothing"), "no context"),
    "a tenant's cap": ("capped", cut(), "at most 4"),
    "a tenant's rate": ("limited", start(), "exceeds its rate"),
    "a deadline": ("any", cut(timeout_ms=1), "deadline"),
}
"""Who sends it, what, and a part of the refusal."""


@pytest.fixture
def held_bytes() -> Iterator[Callable[[], int]]:
    """Without the collector."""
    count = held_bytes_counter()
    gc.collect()
    gc.disable()
    yield count
    gc.enable()


@pytest.fixture
async def service(start_service, byte_tokenizer_path, tmp_path):
    """Its template shows tools and fails on a variable. How long its tokens are is not known, so that what is too long
    is tokenized."""
    library = tokenizers.Tokenizer.from_file(str(byte_tokenizer_path / "tokenizer.json"))
    library.normalizer = normalizers.NFC()
    library.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{{ 1 // (0 if fail else 1) }}{% if refuse %}{{ raise_exception('no') }}{% endif %}{{ tools }}"
        "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    limits = {"capped": TenantLimits(max_prompt_tokens=4), "limited": TenantLimits(requests_per_second=0.001)}
    return await start_service(
        scheduler=SchedulerConfig(tenants=limits),
        tokenizer=Tokenizer(tmp_path),
        authenticator=Keys(),
        admin_listen="127.0.0.1:0",
    )


class Sender:
    """Sends messages as they are on the wire, the same bytes again and again."""

    def __init__(self, service: Any, held_bytes: Callable[[], int]) -> None:
        self._service = service
        self._held_bytes = held_bytes

    async def said(self, method: str, raw: list[bytes], tenant: str = "any") -> str:
        """How a call ended, and what it brought before."""
        channel = self._service.admin_channel if "Admin" in method else self._service.channel
        metadata = (("authorization", tenant),) if tenant else ()
        call = channel.stream_stream(method)(iter(raw), metadata=metadata)
        said = []
        with suppress(grpc.aio.AioRpcError):
            while (raw_answer := await call.read()) is not grpc.aio.EOF:
                said.append(str(pb.GenerateResponse.FromString(raw_answer)) if method.endswith("Generate") else "OK")
        return f"{said} {await call.code()} {await call.details()}"

    async def settled(self) -> int:
        """What is held once buffers for large messages are gone."""
        for _ in range(4):
            await self.said(f"{GENERATION}/Complete", [b"\xff"])
            await asyncio.sleep(0.01)
        return self._held_bytes()


def message(method: str, start: pb.GenerationStart) -> bytes:
    kinds: dict[str, Any] = {"Complete": pb.CompleteRequest, "GenerateOne": pb.GenerateOneRequest}
    kinds["Generate"] = pb.GenerateRequest
    request = kinds[method](start=start)
    request.start.ref = 1
    raw: bytes = request.SerializeToString()
    return raw


PLACES = {
    "a text that is too long",
    "too many ids",
    "a template that refuses",
    "another tenant",
    "a tenant's cap",
    "a deadline",
}
"""A reason for each place that refuses: the others are refused in the same places."""


@pytest.mark.parametrize("num_refusals", [12, pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "reason", [pytest.param(reason, marks=[] if reason in PLACES else [pytest.mark.soak]) for reason in REFUSED]
)
async def test_a_refused_request_leaves_nothing_behind(service, held_bytes, reason, num_refusals):
    tenant, start, part = REFUSED[reason]
    sender = Sender(service, held_bytes)
    calls = cycle([(method, message(method, start)) for method in ("Complete", "GenerateOne", "Generate")])

    async def refuse(num_times: int) -> None:
        for _ in range(num_times):
            method, raw = next(calls)
            said = await sender.said(f"{GENERATION}/{method}", [raw], tenant)
            assert part in said

    if tenant == "limited":
        await sender.said(f"{GENERATION}/Complete", [message("Complete", start)], tenant)
    await refuse(6)
    before, num_objects = await sender.settled(), len(gc.get_objects())
    await refuse(num_refusals)
    running = service.server._running
    # Work that had begun when its caller's deadline passed goes on.
    await until(lambda: not (running.generation.num_live or running.pool._short._jobs))
    await until(lambda: not running.pool._long._jobs)
    most = num_refusals * MOST_BYTES + BUFFER_BYTES
    assert await grown_bytes(sender.settled, before, most) <= most
    assert len(gc.get_objects()) - num_objects < num_refusals * MOST_OBJECTS


async def test_a_stream_keeps_nothing_of_what_was_refused_on_it(service, held_bytes):
    """It may be open for hours."""
    sender = Sender(service, held_bytes)
    before = await sender.settled()
    calls = [service.generation.Generate(metadata=(("authorization", "any"),)) for _ in range(8)]
    frame = pb.GenerateRequest(start=REFUSED["a text that is too long"][1])
    frame.start.ref = 1
    for call in calls:
        await call.write(frame)
        while not (await call.read()).finished:
            pass
    most = 8 * MOST_BYTES + BUFFER_BYTES
    assert await grown_bytes(sender.settled, before, most) <= most
    for call in calls:
        call.cancel()


PROMPTS = {
    "TokenizerService/Tokenize": pb.TokenizeRequest(text=TEXT, include_text_offsets=True),
    "TokenizerService/Detokenize": pb.DetokenizeRequest(token_ids=[1] * (MIB - 1) + [999]),
    "TokenizerService/DescribeTokens": pb.DescribeTokensRequest(token_ids=[1] * MIB),
    "TokenizerService/RenderChat": pb.RenderChatRequest(chat=chat(template_variables_json='{"fail": 1}')),
    "ClassificationService/Classify": pb.ClassifyRequest(inputs=[pb.EmbedInput(text=TEXT)]),
    "ClassificationService/Score": pb.ScoreRequest(queries=[TEXT[:MIB]], documents=[TEXT[:MIB]] * 3),
    "EmbeddingService/Embed": pb.EmbedRequest(inputs=[pb.EmbedInput(text=TEXT)]),
    "GenerationService/Complete": pb.CompleteRequest(start=start()),
    "GenerationService/GenerateOne": pb.GenerateOneRequest(start=start()),
    "GenerationService/Generate": pb.GenerateRequest(start=start(ref=1)),
    "GenerationService/Prefetch": pb.PrefetchRequest(start=start()),
}
"""What a method refuses for what it holds."""


SOME = (f"{GENERATION}/Complete", f"{GENERATION}/Generate", "/penstock.v1.AdminService/GetSettings")
"""A unary method, a stream, and one on the port for administration. One interceptor reads the messages of all."""


def malformed(method: str) -> dict[str, tuple[list[bytes], str]]:
    """By reason: messages as large as they may be, and who sends them."""
    key = "ops" if "Admin" in method else "any"
    large = b"\x7a" + b"\xf0\xff\xff\x03" + b"x" * (MAX_MESSAGE_BYTES - 16)  # one unknown field
    found = {
        "no protobuf": ([b"\xff" * (MAX_MESSAGE_BYTES - 1)], key),
        "breaks off": ([large[:-1]], key),
        "too many parts": ([b"\x7a\x00" * (MAX_MESSAGE_BYTES // 2 - 1)], key),
        "too large": ([large + large], key),
        "without a key": ([large], ""),
    }
    if "Admin" in method:
        found["no administrator"] = ([large], "any")
    return found


def test_every_method_with_a_prompt_is_covered():
    without = {"GenerationService/Release", "ModelService/GetModel", "ModelService/ListModels"}
    named = {name.removeprefix("/penstock.v1.") for name in ACCESS if name.startswith("/penstock.v1.")}
    assert {name for name in named if not name.startswith("AdminService/")} - without == PROMPTS.keys()


async def refuse_all(sender: Sender, cases: list[tuple[str, list[bytes], str]]) -> None:
    for case in cases[:10]:
        await sender.said(*case)
    first, grown = await sender.settled(), []
    for method, of_method in groupby(cases, key=itemgetter(0)):
        before = await sender.settled()
        for case in of_method:
            for _ in range(3):
                said = await sender.said(*case)
                assert "StatusCode.OK" not in said or method.endswith("Generate"), method
        grown.append((await sender.settled() - before, method))
    most = 3 * len(cases) * MOST_BYTES + BUFFER_BYTES
    assert await grown_bytes(sender.settled, first, most) <= most, sorted(grown)[-3:]


async def test_no_method_keeps_what_it_refuses(service, held_bytes):
    prompts = [(f"/penstock.v1.{name}", [prompt.SerializeToString()], "any") for name, prompt in PROMPTS.items()]
    await refuse_all(Sender(service, held_bytes), prompts)


@pytest.mark.parametrize(
    "methods", [SOME, pytest.param(tuple(ACCESS), marks=pytest.mark.soak)], ids=["some methods", "all methods"]
)
async def test_no_method_keeps_what_is_malformed(service, held_bytes, methods):
    cases = [(method, *body) for method in methods for body in malformed(method).values()]
    await refuse_all(Sender(service, held_bytes), cases)
