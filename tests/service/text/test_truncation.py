"""Prompts that are cut to a number of tokens: which are kept, and what counts."""

import tempfile
from pathlib import Path

import grpc
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

import penstock.v1 as pb
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.errors import ServiceError
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.truncation import Truncation

LEFT, RIGHT = pb.TRUNCATION_SIDE_LEFT, pb.TRUNCATION_SIDE_RIGHT


@pytest.mark.parametrize(
    ("wanted", "side", "kept"),
    [
        (3, None, "hij"), (3, LEFT, "hij"), (3, RIGHT, "abc"), (1, None, "j"), (10, None, "abcdefghij"),
        (11, RIGHT, "abcdefghij"), (-1, None, "efghij"), (-1, RIGHT, "abcdef"), (8, None, "efghij"),
    ],
)  # fmt: skip
def test_so_many_tokens_are_kept(wanted, side, kept):
    most = 6 if wanted in (-1, 8) else 20
    truncation = Truncation.of(pb.GenerationStart(truncate_prompt_tokens=wanted, truncation_side=side), most)
    assert truncation is not None
    assert bytes(truncation.cut(list(b"abcdefghij"))).decode() == kept


def test_nothing_is_truncated_by_default():
    assert Truncation.of(pb.GenerationStart(), 10) is None
    assert Truncation.of(pb.GenerationStart(truncation_side=RIGHT), 10) is None
    with pytest.raises(ServiceError, match="truncate_prompt_tokens: must be at least 1, or -1"):
        Truncation.of(pb.GenerationStart(truncate_prompt_tokens=0), 10)


def with_both_ends():
    """A tokenizer of bytes that puts a token before a text and one after it."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)])
    with tempfile.TemporaryDirectory() as directory:
        library.save(f"{directory}/tokenizer.json")
        return Tokenizer(Path(directory))


@pytest.mark.parametrize(
    ("most", "keeps_first", "kept"),
    [
        (9, False, "<ab a b>"), (5, False, "<a b>"), (5, True, "<ab >"), (3, False, "<b>"), (3, True, "<a>"),
        (2, False, "b>"), (1, True, "<"),
    ],
)  # fmt: skip
def test_what_the_tokenizer_puts_around_a_text_is_kept(most, keeps_first, kept):
    tokenizer = with_both_ends()
    whole = tokenizer.encode("ab a b")
    assert (whole[0], whole[-1]) == (256, 257)
    cut = tokenizer.encode("ab a b", True, Truncation(most, keeps_first))
    named = {256: "<", 257: ">"}
    assert "".join(named.get(each) or tokenizer.decode([each]) for each in cut) == kept


def test_without_them_a_text_is_cut_like_any_other():
    tokenizer = with_both_ends()
    bare = tokenizer.encode("ab a b", False)
    assert tokenizer.encode("ab a b", False, Truncation(2, False)) == bare[-2:]


@pytest.fixture
async def service(start_service):
    return await start_service(FakeExecutor(vocab_size=258))


async def complete(service, **fields):
    sampling = pb.SamplingParams(max_tokens=2, seed=1)
    output = pb.OutputOptions(prompt_logprobs=0)
    start = pb.GenerationStart(sampling=sampling, output=output, **fields)
    return await service.generation.Complete(pb.CompleteRequest(start=start))


@pytest.mark.parametrize("side", [LEFT, RIGHT])
@pytest.mark.parametrize("kind", ["text", "token_ids", "chat"])
async def test_an_answer_is_that_of_the_tokens_that_are_kept(service, byte_tokenizer, kind, side):
    text = "a long prompt"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])
    prompt = {"text": text, "token_ids": pb.TokenIds(ids=text.encode()), "chat": chat}[kind]
    ids = list(text.encode())
    if kind == "chat":
        rendered = await service.tokenizer.RenderChat(pb.RenderChatRequest(chat=chat))
        ids = list(rendered.token_ids)
    kept = ids[-5:] if side == LEFT else ids[:5]
    cut = await complete(service, **{kind: prompt}, truncate_prompt_tokens=5, truncation_side=side)
    alone = await complete(service, token_ids=pb.TokenIds(ids=kept))
    assert cut.finished.usage.prompt_tokens == 5
    assert cut.choices[0].text == alone.choices[0].text
    assert cut.prompt_logprobs == alone.prompt_logprobs


async def test_a_prompt_that_is_too_long_fits_with_a_token_of_output(service):
    context = service.engine.facts.max_model_len
    long = pb.TokenIds(ids=[97] * (context + 100))
    for wanted in (-1, context):
        answer = await complete(service, token_ids=long, truncate_prompt_tokens=wanted)
        assert answer.finished.usage.prompt_tokens == context - 1
        assert answer.finished.usage.output_tokens == 1
        assert answer.finished.reason == pb.FINISH_REASON_LENGTH
    text = await complete(service, text="x" * (5 * context), truncate_prompt_tokens=7)
    assert text.finished.usage.prompt_tokens == 7


async def test_of_a_continued_request_the_context_is_cut_too(service):
    first = await complete(service, text="hello")
    begun = 5 + first.finished.usage.output_tokens
    whole = await complete(service, text="abc", continue_from=first.request_id)
    assert whole.finished.usage.prompt_tokens == begun + 3
    for wanted, kept in ((2, 2), (begun, begun), (begun + 3, begun + 3), (100, begun + 3)):
        cut = await complete(service, text="abc", continue_from=first.request_id, truncate_prompt_tokens=wanted)
        assert cut.finished.usage.prompt_tokens == kept


async def test_a_cut_prompt_finds_what_is_cached_of_it(service):
    kept = pb.TokenIds(ids=[98] * 64)
    await service.generation.Complete(pb.CompleteRequest(start=pb.GenerationStart(token_ids=kept)))
    start = pb.GenerationStart(token_ids=pb.TokenIds(ids=[97] * 100 + [98] * 64), truncate_prompt_tokens=64)
    answer = await service.generation.Complete(pb.CompleteRequest(start=start))
    assert answer.finished.usage.cached_tokens == 48


async def test_inputs_of_embeddings_keep_their_first_tokens(service):
    def request(text, **fields):
        ids = pb.EmbedInput(token_ids=pb.TokenIds(ids=text.encode()))
        return pb.EmbedRequest(inputs=[pb.EmbedInput(text=text), ids], **fields)

    for side, kept in ((None, "abc"), (RIGHT, "abc"), (LEFT, "def")):
        cut = await service.embedding.Embed(request("abcdef", truncate_prompt_tokens=3, truncation_side=side)).read()
        assert cut.usage.prompt_tokens == 6
        assert cut.embeddings == (await service.embedding.Embed(request(kept)).read()).embeddings
    context = service.engine.facts.max_model_len
    long = await service.embedding.Embed(request("x" * (context + 9), truncate_prompt_tokens=-1)).read()
    assert long.usage.prompt_tokens == 2 * context


async def test_the_tokenizer_cuts_as_a_request_does(service):
    def request(**fields):
        return pb.TokenizeRequest(text="abcdef", **fields)

    assert bytes((await service.tokenizer.Tokenize(request(truncate_prompt_tokens=2))).token_ids) == b"ef"
    first = await service.tokenizer.Tokenize(request(truncate_prompt_tokens=2, truncation_side=RIGHT))
    assert bytes(first.token_ids) == b"ab"


@pytest.mark.parametrize("wanted", [0, -2, 4097])
async def test_what_is_out_of_bounds_is_refused_by_name(service, wanted):
    assert service.engine.facts.max_model_len == 4096
    with pytest.raises(grpc.aio.AioRpcError, match="truncate_prompt_tokens: must be at least") as error:
        await complete(service, text="x", truncate_prompt_tokens=wanted)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
