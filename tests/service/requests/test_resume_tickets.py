"""Tickets that allow nothing: broken ones, and those for another request or for a service that computes otherwise."""

import grpc
import pytest
from wire.resumption import messages_of, ticket_of

import penstock.v1 as pb
from penstock.models.checkpoint.digest import DIGEST_BYTES, CheckpointDigest, short_digest
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.identity import AllowAll, Principal
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.text.tokenizer import Tokenizer

BOTH = pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS


async def refused(service, start, details_of):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await messages_of(service, start)
    info = details_of(error.value)["ErrorInfo"]
    return info.reason, dict(info.metadata), error.value.details()


def begun(start, ids=(97, 98), ticket=b""):
    """The start that continues a request of which some tokens were received."""
    resumed = pb.GenerationStart()
    resumed.CopyFrom(start)
    resumed.resume_from.ticket = ticket
    for number in range(start.sampling.n or 1):
        resumed.resume_from.choices.add(token_ids=[] if number else ids, text_chars=0 if number else len(ids))
    return resumed


def sealed(content):
    """A ticket whose checksum is right."""
    return content + short_digest(content)


async def test_refused(start_service, details_of):
    """Each by name; the service goes on."""
    service = await start_service()
    sampling, output = pb.SamplingParams(max_tokens=10, stop_token_ids=[100]), pb.OutputOptions(format=BOTH)
    start = pb.GenerationStart(text="hello", sampling=sampling, output=output)
    ticket = await ticket_of(service, start)

    async def reason(resumed):
        found, _, message = await refused(service, resumed, details_of)
        return found, message

    version, seed, digests = ticket[:1], ticket[1:9], ticket[9:-DIGEST_BYTES]
    assert sealed(version + seed + digests) == ticket
    of_other_versions = [sealed(bytes([version[0] + step]) + seed + digests) for step in (-1, 1)]
    damaged = [b"x", b"x" * 89, b"x" * 128, ticket[:-1], ticket + b"x", bytes(len(ticket)), b"\x01" + ticket[1:]]
    for broken in (*damaged, *of_other_versions, sealed(version + b"\xff" * 8 + digests)):
        found, message = await reason(begun(start, ticket=broken))
        assert found == "TICKET_INVALID", broken
        assert "resume_from" in message
    for resumed, field in (
        (begun(start, ticket=b""), "resume_from.ticket"),
        (begun(start, ticket=b"x" * 129), "resume_from.ticket"),
        (begun(start, ids=[97, 258], ticket=ticket), "resume_from.choices[0].token_ids[1]"),
        (begun(start, ids=[97] * 11, ticket=ticket), "resume_from.choices[0].token_ids"),
        (begun(start, ids=[100, 97], ticket=ticket), "resume_from.choices[0].token_ids"),
        (begun(start, ids=[97] * 200_000, ticket=ticket), "resume_from.choices[0].token_ids"),
    ):
        found, message = await reason(resumed)
        assert (found, message.partition(":")[0].removeprefix("start.")) == ("INVALID_FIELD", field)
    more = begun(start, ticket=ticket)
    more.resume_from.choices.add()
    assert await reason(more) == (
        "INVALID_FIELD",
        "resume_from.choices: must have one for each of the n choices, 1; it has 2",
    )
    with_prompt_logprobs = begun(start, ticket=ticket)
    with_prompt_logprobs.output.prompt_logprobs = 1
    assert (await reason(with_prompt_logprobs))[0] == "NOT_RESUMABLE"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.generation.Complete(pb.CompleteRequest(start=begun(start, ticket=ticket)))
    assert details_of(error.value)["ErrorInfo"].reason == "NOT_RESUMABLE"
    assert (await messages_of(service, start))[-1].finished.status.code == 0


async def test_open_prompt_is_refused(open_frames):
    frames = await open_frames()
    await frames.send(pb.GenerateRequest(start=begun(pb.GenerationStart(ref=1, text="a", open=True), ticket=b"x")))
    assert frames.reason_of((await frames.finished()).status) == "NOT_RESUMABLE"


class ActsForAnyone:
    """A gateway's key."""

    def authenticate(self, metadata):
        return Principal("gateway", may_act_for_others=True)


ONE = CheckpointDigest(b"1" * 8, b"2" * 8, b"3" * 8)


@pytest.mark.parametrize(
    ("differs", "other"),
    [
        ("config", {"checkpoint": ONE._replace(config=b"x" * 8)}),
        ("weights", {"checkpoint": ONE._replace(weights=b"x" * 8)}),
        ("tokenizer", {"checkpoint": ONE._replace(tokenizer=b"x" * 8)}),
        ("sampling", {"sampling_defaults": SamplingDefaults(pb.SamplingParams(top_k=3))}),
        ("limits", {"sampling_defaults": SamplingDefaults(pb.SamplingParams(max_tokens=3))}),
        ("limits", {"executor": {"max_model_len": 64}}),
        ("numerics", {"executor": {"instruction_set": "avx2"}}),
        ("numerics", {"executor": {"dtype": "bfloat16"}}),
        ("tenant", {"start": {"tenant": "other"}, "authenticator": ActsForAnyone()}),
        ("prompt", {"start": {"text": "hallo"}}),
        ("sampling", {"sampling": {"top_p": 0.5}}),
        ("sampling", {"sampling": {"seed": 5}}),
        ("output", {"sampling": {"stop": ["zz"]}}),
        ("output", {"start": {"output": pb.OutputOptions(include_special_tokens=True)}}),
        ("output", {"start": {"constraint": pb.Constraint(regex="[a-z]*")}}),
    ],
)
async def test_another_replica(start_service, details_of, differs, other):
    """The refusal names what differs."""
    first = await start_service(checkpoint=ONE, authenticator=other.get("authenticator", AllowAll()))
    start = pb.GenerationStart(text="hello", sampling=pb.SamplingParams(max_tokens=10))
    ticket = await ticket_of(first, start)
    executor = FakeExecutor(vocab_size=258, **other.pop("executor", {}))
    start.sampling.MergeFrom(pb.SamplingParams(**other.pop("sampling", {})))
    start.MergeFrom(pb.GenerationStart(**other.pop("start", {})))
    second = await start_service(executor, **{"checkpoint": ONE, **other})
    reason, metadata, message = await refused(second, begun(start, ticket=ticket), details_of)
    assert (reason, metadata["differs"]) == ("TICKET_MISMATCH", differs)
    assert message.startswith("resume_from.ticket: it is for ")


TEMPLATE = "{{ tools if tools }}{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}<|turn|>assistant\n"
TOOL = pb.Tool(function=pb.FunctionTool(name="f", parameters_json='{"type": "object"}'))
STRICT = pb.Tool(function=pb.FunctionTool(name="f", parameters_json='{"type": "object"}', strict=True))


@pytest.mark.parametrize(
    ("chat", "output", "config"),
    [
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)}, {}, {}),
        ({"parallel_tool_calls": False}, {}, {}),
        ({"tools": [STRICT]}, {}, {}),
        ({}, {"parse_tool_calls": False}, {}),
        ({}, {"parse_reasoning": False}, {}),
        ({}, {}, {"tool_call_parser": "pythonic"}),
        ({}, {}, {"reasoning_parser": "none"}),
    ],
    ids=["forced", "one call", "strict", "calls not parsed", "reasoning not parsed", "call format", "reasoning format"],
)
async def test_another_output(start_service, write_tokenizer, tmp_path, details_of, chat, output, config):
    """Its text would be divided otherwise, and what its caller received would not be the beginning of its parts."""
    common = {
        "tokenizer": Tokenizer(write_tokenizer(tmp_path, TEMPLATE)),
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
    }

    def start(chat, output):
        chat = {"messages": [pb.ChatMessage(role="user", content="hi")], "tools": [TOOL], **chat}
        output = {"parse_tool_calls": True, "parse_reasoning": True, **output}
        sampling = pb.SamplingParams(max_tokens=5)
        return pb.GenerationStart(chat=pb.Chat(**chat), output=pb.OutputOptions(**output), sampling=sampling)

    first, second = await start_service(**common), await start_service(**common | config)
    ticket = await ticket_of(first, start({}, {}))
    same, other = (begun(each, ids=(), ticket=ticket) for each in (start({}, {}), start(chat, output)))
    assert (await messages_of(first, same))[-1].finished.status.code == 0
    reason, metadata, _ = await refused(second, other, details_of)
    assert (reason, metadata["differs"]) == ("TICKET_MISMATCH", "output")
