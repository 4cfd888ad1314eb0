"""Which model a request is for: its name, or none for the only one, in every method that needs a model."""

import grpc
import pytest

import penstock.v1 as pb
from penstock.service.errors import Reason

NAME = "bytes"
START = pb.GenerationStart(text="hi", sampling=pb.SamplingParams(max_tokens=1))


def start(model: str) -> pb.GenerationStart:
    named = pb.GenerationStart(model=model)
    named.MergeFrom(START)
    return named


CALLS = {
    "GenerateOne": lambda service, model: service.generation.GenerateOne(
        pb.GenerateOneRequest(start=start(model))
    ).read(),
    "Complete": lambda service, model: service.generation.Complete(pb.CompleteRequest(start=start(model))),
    "Embed": lambda service, model: service.embedding.Embed(
        pb.EmbedRequest(model=model, inputs=[pb.EmbedInput(text="hi")])
    ).read(),
    "GetModel": lambda service, model: service.model.GetModel(pb.GetModelRequest(model=model)),
    "Tokenize": lambda service, model: service.tokenizer.Tokenize(pb.TokenizeRequest(model=model, text="hi")),
    "Detokenize": lambda service, model: service.tokenizer.Detokenize(pb.DetokenizeRequest(model=model, token_ids=[1])),
    "DescribeTokens": lambda service, model: service.tokenizer.DescribeTokens(
        pb.DescribeTokensRequest(model=model, token_ids=[1])
    ),
    "RenderChat": lambda service, model: service.tokenizer.RenderChat(
        pb.RenderChatRequest(model=model, chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]))
    ),
    "Classify": lambda service, model: service.classification.Classify(
        pb.ClassifyRequest(model=model, inputs=[pb.EmbedInput(text="hi")])
    ),
    "Score": lambda service, model: service.classification.Score(
        pb.ScoreRequest(model=model, queries=["a"], documents=["b"])
    ),
}


async def test_a_model_that_is_not_served_is_not_found_and_the_served_one_is_named(start_service, details_of):
    service = await start_service()
    for method, call in CALLS.items():
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(service, "an-other")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND, method
        details = details_of(error.value)
        assert details["ErrorInfo"].reason == Reason.MODEL_NOT_FOUND.name
        assert details["BadRequest"].field_violations[0].field == "model"
        message = str(error.value.details())
        assert message.endswith(f"send {NAME}")
        assert "an-other" not in message
    assert service.engine.stats().steps == 0


async def test_its_name_and_none_are_the_served_model(start_service):
    service = await start_service()
    for method, call in CALLS.items():
        for model in ("", NAME):
            if method in ("Classify", "Score"):  # this model has no head
                with pytest.raises(grpc.aio.AioRpcError, match="classification head"):
                    await call(service, model)
            else:
                await call(service, model)


async def test_on_a_stream_only_the_request_fails(start_service, new_reading):
    service = await start_service()
    frames = [pb.GenerateRequest(start=start(model)) for model in ("an-other", NAME)]
    for ref, frame in enumerate(frames, 1):
        frame.start.ref = ref
    reading = await new_reading().read(service.generation.Generate(iter(frames)))
    statuses = {finished.ref: finished.status.code for outcome in reading.outcomes.values()
                for finished in outcome.finished}  # fmt: skip
    assert statuses == {1: grpc.StatusCode.NOT_FOUND.value[0], 2: 0}


async def test_the_list_has_one_page(start_service):
    service = await start_service()
    [model] = (page := await service.model.ListModels(pb.ListModelsRequest(page_size=1))).models
    assert model == (await service.model.GetModel(pb.GetModelRequest())).model
    assert (model.name, page.next_page_token) == (NAME, "")
    with pytest.raises(grpc.aio.AioRpcError, match="page_token") as error:
        await service.model.ListModels(pb.ListModelsRequest(page_token="2"))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_response_has_what_applies_to_the_caller(start_service):
    service = await start_service()
    response = await service.model.GetModel(pb.GetModelRequest(tenant="default"))
    assert (response.tenant, response.may_act_for_others) == ("default", False)
    assert not response.HasField("requests_per_second")
