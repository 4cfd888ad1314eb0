"""GET /v1/models: the served models, with the longest context as in vLLM."""

import time

from fastapi import APIRouter
from pydantic import BaseModel, Field

import penstock.v1 as pb
from penstock.clients.gateway.routes.caller_route import ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.unsupported import model_not_found

_MAX_MODELS = 1000
"""The contract's limit on a page, more than a service has."""


class ModelCard(BaseModel):
    """A model."""

    id: str = Field(description="The model's name in requests.")
    object: str = "model"
    created: int = Field(description="The Unix timestamp, in seconds, of when this gateway started.")
    owned_by: str = "penstock"
    root: str = Field(description="The same as id.")
    parent: str | None = None
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
        """Lists the served models."""
        request = pb.ListModelsRequest(page_size=_MAX_MODELS)
        page = await caller.call(caller.stubs.model.ListModels, request)
        return ModelList(data=[_card(model, created) for model in page.models])

    @router.get("/v1/models/{name:path}")  # names on the hub have a slash
    async def retrieve_model(name: str, caller: CallerDep) -> ModelCard:
        """Returns a model."""
        if name != caller.model.name:
            raise model_not_found(name, caller.model.name)
        return _card(caller.model, created)

    return router


def _card(model: pb.Model, created: int) -> ModelCard:
    return ModelCard(id=model.name, created=created, root=model.name, max_model_len=model.max_model_len)
