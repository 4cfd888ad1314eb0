"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM. They call the service's administration with the
caller's key, and are served only if the gateway knows where that listens."""

from functools import partial

from fastapi import APIRouter
from starlette.responses import PlainTextResponse

import penstock.v1 as pb
from penstock.clients.gateway.errors import renaming
from penstock.clients.gateway.field_names import caller_name
from penstock.clients.gateway.routes.caller_route import ERRORS, CallerDep, CallerRoute
from penstock.clients.gateway.schemas.adapters import LoadLoraRequest, UnloadLoraRequest

_NAMES = ((r"name", "lora_name"), (r"path", "lora_path"))


def make_router() -> APIRouter:
    """Makes both routes."""
    router = APIRouter(route_class=CallerRoute, tags=["models"], responses=ERRORS)

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(request: LoadLoraRequest, caller: CallerDep) -> PlainTextResponse:
        """Loads a LoRA adapter, which requests may then name as their model."""
        message = pb.LoadAdapterRequest(name=request.lora_name, path=request.lora_path)
        with renaming(partial(caller_name, names=_NAMES)):
            await caller.call(caller.stubs.admin.LoadAdapter, message, is_short=False)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(request: UnloadLoraRequest, caller: CallerDep) -> PlainTextResponse:
        """Unloads a LoRA adapter. Running requests finish."""
        with renaming(partial(caller_name, names=_NAMES)):
            await caller.call(caller.stubs.admin.UnloadAdapter, pb.UnloadAdapterRequest(name=request.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    return router
