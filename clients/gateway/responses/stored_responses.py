"""OpenAI's paths for stored responses. Nothing is stored here; each path returns an error."""

from fastapi import APIRouter
from starlette.responses import Response

from penstock.clients.gateway.errors import GatewayError


def make_router() -> APIRouter:
    """Makes the routes."""
    router = APIRouter(include_in_schema=False)

    @router.get("/v1/responses/{response_id}")
    @router.delete("/v1/responses/{response_id}")
    @router.get("/v1/responses/{response_id}/input_items")
    @router.post("/v1/responses/{response_id}/cancel")
    async def not_found(response_id: str) -> Response:
        problem = "nothing is stored here; keep the responses that you get"
        raise GatewayError(404, f"response_id: {problem}", param="response_id", code="response_not_found")

    return router
