"""A tokenizer may have more tokens than the model has rows: these are refused in prompts, and never chosen."""

import asyncio
import json
import shutil

import grpc
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken

import penstock.v1 as pb
from penstock.clients import AsyncClient
from penstock.models.architecture.registry import spec_from_config
from penstock.service.app.embedded import local_service
from penstock.service.app.prepare import prepare
from penstock.service.chat_templates.chat_message import TemplateInput, TemplateMessage
from penstock.service.config.command_line import parse_config
from penstock.service.requests.grammar_check import GrammarChecks
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.tokenizer_files import predict_facts

NUM_ROWS = 258
IMAGE, WORD = 258, 259
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": NUM_ROWS, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% if m.content == 'show' %}<|image|>{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory, byte_tokenizer_path):
    """A model of 258 rows whose tokenizer has two more tokens, one of them for text."""
    path = tmp_path_factory.mktemp("surplus")
    library = tokenizers.Tokenizer.from_file(str(byte_tokenizer_path / "tokenizer.json"))
    library.add_tokens([AddedToken("<|image|>", special=True), AddedToken("penstock", special=False)])
    library.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE, "image_token": "<|image|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.normal(float(name.endswith("norm.weight")), 0.3, size, generator=generator)
        for name, size in spec_from_config(CONFIG).tensors()
    }
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer(directory, num_rows=NUM_ROWS)


def foreseen(directory, num_rows=None):
    facts = predict_facts(directory, num_rows)
    assert facts is not None
    return facts


def test_the_predicted_facts_match_the_tokenizers(directory, tokenizer):
    facts = foreseen(directory, NUM_ROWS)
    assert facts == tokenizer.facts
    assert (facts.vocab_size, facts.num_ids, facts.eos_token_ids, facts.warnings) == (258, 260, (256,), ())
    assert (foreseen(directory, 10_000).vocab_size, foreseen(directory).vocab_size) == (260, 260)


def test_an_end_token_without_a_row_is_reported(directory):
    facts = foreseen(directory, 256)
    assert facts.eos_token_ids == ()
    ignored, none = facts.warnings
    assert "eos token 256 is ignored: the model has 256 tokens" in ignored
    assert "no token ends an output" in none


def test_warnings_are_logged_at_the_start(directory, tmp_path, caplog):
    path = shutil.copytree(directory, tmp_path / "model")
    (path / "tokenizer_config.json").write_text("{}")
    prepared = prepare(parse_config([str(path), "--port=0", "--admin-listen=off"]))
    assert prepared.worker.eos_token_ids == ()
    assert (prepared.worker.tokenizer_vocab_size, prepared.worker.tokenizer_num_ids) == (258, 260)
    [record] = [record for record in caplog.records if "no token ends an output" in record.message]
    assert record.levelname == "WARNING"


def test_its_own_tokens_are_still_the_tokenizers(tokenizer):
    assert tokenizer.encode("a penstock") == [97, 32, WORD]
    assert tokenizer.encode_chat(TemplateInput([TemplateMessage("user", "show")]))[-1] == IMAGE
    assert IMAGE not in tokenizer.encode("<|image|>")
    assert tokenizer.bad_word_ids(["penstock", "a"]) == ((97,), (32, 97))


STARTS = {
    "token_ids.ids[1]": pb.GenerationStart(token_ids=pb.TokenIds(ids=[97, IMAGE])),
    "text": pb.GenerationStart(text="a penstock"),
    "chat": pb.GenerationStart(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="show")])),
    "sampling.stop_token_ids[0]": pb.GenerationStart(text="a", sampling=pb.SamplingParams(stop_token_ids=[IMAGE])),
    "sampling.logit_bias[259]": pb.GenerationStart(text="a", sampling=pb.SamplingParams(logit_bias={WORD: 5.0})),
    "sampling.allowed_token_ids[1]": pb.GenerationStart(
        text="a", sampling=pb.SamplingParams(allowed_token_ids=[97, WORD])
    ),
}


@pytest.mark.parametrize("field", STARTS)
async def test_they_are_refused_in_a_request(start_service, tokenizer, field):
    service = await start_service(tokenizer=tokenizer)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.generation.Complete(pb.CompleteRequest(start=STARTS[field]))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = refused.value.details() or ""
    assert details.startswith(field)
    assert "vocabulary size, 258" in details


async def test_a_text_names_the_token_that_is_refused(start_service, tokenizer):
    service = await start_service(tokenizer=tokenizer)
    with pytest.raises(grpc.aio.AioRpcError, match=r"text: .*token 2 of the prompt is 259 \('penstock'\)"):
        await service.generation.Complete(pb.CompleteRequest(start=pb.GenerationStart(text="a penstock")))


async def test_they_are_refused_after_a_context(start_service, tokenizer):
    service = await start_service(tokenizer=tokenizer)
    first = pb.GenerationStart(text="a", sampling=pb.SamplingParams(max_tokens=2), retain_ms=60_000)
    context = (await service.generation.Complete(pb.CompleteRequest(start=first))).request_id
    for more in ({"text": " penstock"}, {"token_ids": pb.TokenIds(ids=[IMAGE])}, {"chat": STARTS["chat"].chat}):
        with pytest.raises(grpc.aio.AioRpcError, match="vocabulary size, 258"):
            await service.generation.Complete(
                pb.CompleteRequest(start=pb.GenerationStart(continue_from=context, **more))
            )


async def test_they_are_refused_in_what_is_embedded(start_service, tokenizer):
    service = await start_service(tokenizer=tokenizer)
    for given in ({"text": "penstock"}, {"token_ids": pb.TokenIds(ids=[IMAGE])}):
        request = pb.EmbedRequest(inputs=[pb.EmbedInput(**given)])
        with pytest.raises(grpc.aio.AioRpcError, match="vocabulary size, 258"):
            await service.embedding.Embed(request).read()


async def test_the_service_reports_the_smaller_number(start_service, tokenizer):
    service = await start_service(tokenizer=tokenizer)
    assert (await service.model.GetModel(pb.GetModelRequest())).model.vocab_size == NUM_ROWS
    tokens = await service.tokenizer.Tokenize(pb.TokenizeRequest(text="penstock"))
    assert tokens.token_ids == [WORD]
    with pytest.raises(grpc.aio.AioRpcError, match="must be below the vocabulary size, 258; it is 259"):
        await service.tokenizer.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))


async def test_a_grammar_leaves_the_spelling_to_the_model(tokenizer, byte_tokenizer):
    for one, forces in ((tokenizer, False), (byte_tokenizer, True)):
        checks = GrammarChecks(one)
        grammar = await checks.grammar(pb.Constraint(regex="penstock"), "me")
        checks.close()
        assert ("no_forcing" not in grammar) == forces


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_they_are_never_chosen(directory, request, backend):
    if backend == "cpu":
        request.getfixturevalue("cpu_library")

    async def ask(target):
        async with AsyncClient(target) as client:
            return [
                await client.complete("a", max_tokens=60, temperature=5.0, ignore_eos=True, seed=1, logprobs=3),
                await client.complete("a", max_tokens=30, constraint={"regex": "(penstock,){2}"}, temperature=0.0),
                await client.complete("a", max_tokens=9, bad_words=["penstock", "b"]),
            ]

    flags = {"backend": backend, "kv_cache_memory_bytes": "8M", "threads": 1}
    with local_service(str(directory), **flags) as target:
        free, held, _ = asyncio.run(ask(target))
    assert max(free.token_ids) < NUM_ROWS
    assert held.text == "penstock,penstock,"
    assert max(held.token_ids) < NUM_ROWS
