"""The tokens of predicted outputs."""

import pytest

import penstock.v1 as pb
from penstock.service.errors import ServiceError
from penstock.service.text.tokenizer import Tokenizer

EOS = 256


async def test_a_prediction_is_tokenized_and_bounded(convert, make_builder):
    def predicted(prediction=None, **fields):
        return pb.GenerationStart(text="hi", prediction=prediction, **fields)

    request = await convert(predicted(pb.Prediction(text="so <|im_end|>")))
    assert request.prediction == list(b"so <|im_end|>")  # special tokens are ordinary text
    assert (request.max_drafts, request.num_prompt_tokens, request.num_queued_tokens) == (32, 2, 15)
    request = await convert(predicted(pb.Prediction(token_ids=pb.TokenIds(ids=[5, EOS])), max_draft_tokens=3))
    assert (request.prediction, request.max_drafts) == ([5, EOS], 3)
    for none in (None, pb.Prediction(), pb.Prediction(text="")):
        request = await convert(predicted(none))
        assert (request.prediction, request.max_drafts) == ([], 0)
    small = make_builder(max_model_len=100)
    for long in (pb.Prediction(text="x" * 5000), pb.Prediction(token_ids=pb.TokenIds(ids=[120] * 5000))):
        assert (await convert(predicted(long), small)).prediction == [120] * 100


async def test_a_prediction_that_is_not_used_is_not_tokenized(convert, make_builder, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode_after", None)
    builder = make_builder(max_drafts=4, drafts_predictions=False)
    for prediction in (pb.Prediction(text="so"), pb.Prediction(token_ids=pb.TokenIds(ids=[5]))):
        request = await convert(pb.GenerationStart(text="hi", prediction=prediction), builder)
        assert (request.prediction, request.max_drafts) == ([], 4)


@pytest.mark.parametrize("number", [1, 5000])
async def test_a_prediction_with_ids_that_the_model_lacks_is_refused(convert, number):
    ids = pb.TokenIds(ids=[*[1] * (number - 1), 100_000])
    with pytest.raises(ServiceError) as refused:
        await convert(pb.GenerationStart(text="hi", prediction=pb.Prediction(token_ids=ids)))
    assert refused.value.field == f"prediction.token_ids.ids[{number - 1}]"
