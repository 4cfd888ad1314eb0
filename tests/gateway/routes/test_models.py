"""GET /v1/models, as the openai package sees it."""

import time

import httpx
import openai
import pytest


@pytest.fixture
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_model_is_listed_with_its_context(client):
    (card,) = client.models.list()
    assert (card.id, card.object, card.owned_by) == ("gpt-4o", "model", "penstock")
    assert 0 < card.created <= time.time()
    assert card.model_extra == {"root": "gpt-4o", "parent": None, "max_model_len": card.max_model_len}
    assert card.max_model_len > 0


def test_a_model_can_be_retrieved_by_name(client):
    assert client.models.retrieve("gpt-4o") == client.models.list().data[0]


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "there is gpt-4o" in caught.value.message


def test_a_malformed_authorization_header_is_reported_first(scripted):
    answer = httpx.get(f"{scripted}/v1/models", headers={b"authorization": b"Bearer \xff"}, timeout=120)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
