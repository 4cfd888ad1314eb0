"""What counts against a tenant's rate: all that it sends, whatever becomes of it."""

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.service.auth.identity import Principal

GENERATION, TOKENIZER = "GenerationService", "TokenizerService"
LONG = "x" * 10_000
CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
BAD_CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], template_variables_json="[")
WRONG_ROLE = pb.Chat(messages=[pb.ChatMessage(role="nobody", content="hi")])
SENT = {
    "a prompt": (f"{GENERATION}/Complete", pb.CompleteRequest(start=pb.GenerationStart(text="hi"))),
    "a text that is too long": (f"{GENERATION}/Complete", pb.CompleteRequest(start=pb.GenerationStart(text=LONG))),
    "a chat that is too long": (
        f"{GENERATION}/Complete",
        pb.CompleteRequest(
            start=pb.GenerationStart(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=LONG)]))
        ),
    ),
    "bad template values": (f"{GENERATION}/Complete", pb.CompleteRequest(start=pb.GenerationStart(chat=BAD_CHAT))),
    "a bad field": (
        f"{GENERATION}/Complete",
        pb.CompleteRequest(start=pb.GenerationStart(text="hi", sampling=pb.SamplingParams(temperature=1000))),
    ),
    "no context": (
        f"{GENERATION}/Complete",
        pb.CompleteRequest(start=pb.GenerationStart(text="hi", continue_from="x")),
    ),
    "a stream": (f"{GENERATION}/GenerateOne", pb.GenerateOneRequest(start=pb.GenerationStart(text=LONG))),
    "a frame": (f"{GENERATION}/Generate", pb.GenerateRequest(start=pb.GenerationStart(ref=1, text=LONG))),
    "an embedding": (
        "EmbeddingService/Embed",
        pb.EmbedRequest(inputs=[pb.EmbedInput(text=LONG)]),
    ),
    "a class": (
        "ClassificationService/Classify",
        pb.ClassifyRequest(inputs=[pb.EmbedInput(text="hi")]),
    ),
    "a score": ("ClassificationService/Score", pb.ScoreRequest(queries=["hi"], documents=["ho"])),
    "text to tokens": (f"{TOKENIZER}/Tokenize", pb.TokenizeRequest(text="hi")),
    "tokens to text": (f"{TOKENIZER}/Detokenize", pb.DetokenizeRequest(token_ids=[1])),
    "foreign tokens": (f"{TOKENIZER}/Detokenize", pb.DetokenizeRequest(token_ids=[999])),
    "many tokens to their texts": (
        f"{TOKENIZER}/DescribeTokens",
        pb.DescribeTokensRequest(token_ids=[1] * 1025),
    ),
    "a chat to tokens": (f"{TOKENIZER}/RenderChat", pb.RenderChatRequest(chat=CHAT)),
    "a bad chat to tokens": (f"{TOKENIZER}/RenderChat", pb.RenderChatRequest(chat=WRONG_ROLE)),
}


class Keys:
    """A key is its tenant's name; a gateway's may act for others."""

    def authenticate(self, metadata):
        key = dict(metadata)["authorization"]
        return Principal(key, may_act_for_others=key == "gateway")


@pytest.fixture
async def service(start_service):
    limited = TenantLimits(requests_per_second=0.001)
    return await start_service(scheduler=SchedulerConfig(default_tenant=limited), authenticator=Keys())


async def said(service, method, message, tenant="a"):
    """How the call ended, in words."""
    call = service.channel.stream_stream(f"/penstock.v1.{method}")(
        iter([message.SerializeToString()]), metadata=(("authorization", tenant),)
    )
    answers = ""
    try:
        while (raw := await call.read()) is not grpc.aio.EOF:
            answers += str(pb.GenerateResponse.FromString(raw)) if method.endswith("Generate") else ""
    except grpc.aio.AioRpcError as error:
        return error.details()
    return answers


@pytest.mark.parametrize("what", SENT)
async def test_it_counts(service, what):
    method, message = SENT[what]
    assert "exceeds its rate" not in await said(service, method, message)
    assert "exceeds its rate" in await said(service, method, message)
    assert "exceeds its rate" not in await said(service, method, message, tenant="b")


async def test_a_call_for_few_tokens_is_free(service):
    """Clients make many while they read a stream."""
    for _ in range(3):
        message = pb.DescribeTokensRequest(token_ids=[1] * 1024)
        assert "exceeds its rate" not in await said(service, f"{TOKENIZER}/DescribeTokens", message)


async def test_a_call_of_the_tokenizer_costs_no_request(service):
    """The HTTP gateway makes one for a request of its caller's."""
    for what in ("text to tokens", "a text that is too long"):
        assert "exceeds its rate" not in await said(service, *SENT[what])


async def test_naming_tokens_is_free(service):
    """Clients do it while they read a stream."""
    for _ in range(3):
        request = pb.DescribeTokensRequest(token_ids=[1])
        assert not await said(service, f"{TOKENIZER}/DescribeTokens", request)


@pytest.mark.parametrize("tenant", ["", "no tenant", "x" * 65])
async def test_what_is_no_tenant_is_not_remembered(service, tenant):
    request = pb.CompleteRequest(start=pb.GenerationStart(text=LONG, tenant=tenant or "\n"))
    assert (await said(service, f"{GENERATION}/Complete", request, "gateway")).startswith("tenant: must be")
    assert not service.engine._scheduler.tenants._uses
