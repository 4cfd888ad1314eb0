"""GET /v1/models: the served models, with the longest context as in vLLM."""

import time
from collections.abc import Sequence

from fastapi import APIRouter
from pydantic import BaseModel, Field

import penstock.v1 as pb
from penstock.clients.gateway.routes.caller_route import ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.unsupported import model_not_found
from penstock.clients.gateway.upstream.service_link import UpstreamCaller

_MAX_MODELS = 1000
"""The contract's limit on a page: a service has at most as many adapters."""


class ModelCard(BaseModel):
    """A model."""

    id: str = Field(description="The model's name in requests.")
    object: str = "model"
    created: int = Field(description="The Unix timestamp, in seconds, of when this gateway started.")
    owned_by: str = "penstock"
    root: str = Field(description="The same as id.")
    parent: str | None = Field(None, description="For a LoRA adapter: the model that it changes.")
    max_model_len: int = Field(description="The maximum number of tokens of prompt and output together.")


class ModelList(BaseModel):
    """The list of models."""

    object: str = "list"
    data: list[ModelCard]


def make_router() -> APIRouter:
    """Makes the routes of the list and of each model."""
    created = int(time.time())
    router = APIRouter(route_class=CallerRoute, tags=["models"], responses=ERRORS)

    @router.get("/v1/models")
    async def list_models(caller: CallerDep) -> ModelList:
        """Lists the served model and its LoRA adapters."""
        return ModelList(data=[_card(model, created) for model in await _models(caller)])

    @router.get("/v1/models/{name:path}")  # names on the hub have a slash
    async def retrieve_model(name: str, caller: CallerDep) -> ModelCard:
        """Returns a model."""
        if name == caller.model.name:
            return _card(caller.model, created)
        models = await _models(caller) if "lora" in caller.model.features else ()
        for model in models:
            if model.name == name:
                return _card(model, created)
        raise model_not_found(name, caller.model.name)

    return router


async def _models(caller: UpstreamCaller) -> Sequence[pb.Model]:
    page = await caller.call(caller.stubs.model.ListModels, pb.ListModelsRequest(page_size=_MAX_MODELS))
    return page.models


def _card(model: pb.Model, created: int) -> ModelCard:
    return ModelCard(
        id=model.name,
        created=created,
        root=model.name,
        parent=model.parent or None,
        max_model_len=model.max_model_len,
    )
