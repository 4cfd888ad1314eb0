"""The warning that other machines can reach a gateway whose callers need no key."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.clients.errors import RequestFailed
from penstock.clients.gateway.upstream.service_link import ServiceLink, service_needs_key

_log = logging.getLogger(__name__)


@asynccontextmanager
async def exposure_warning(link: ServiceLink) -> AsyncIterator[None]:
    """Logs the warning if it applies: it depends on whether the service requires keys."""
    task = asyncio.create_task(_warn(link), name="penstock-gateway-exposure")
    try:
        yield
    finally:
        task.cancel()


async def _warn(link: ServiceLink) -> None:
    settings = link.settings
    if not settings.exposed_address:
        return
    if settings.service.api_key is not None:
        what, remedy = "under the key of --api-key-file", "let only a proxy that knows its callers reach it"
    else:
        try:
            if await service_needs_key(link):
                return
            what = "without a key"
        except RequestFailed:
            what = "unless it requires keys"
        remedy = "start penstock serve with --api-keys-file"
    _log.warning(
        "--host %s: anyone who can reach this address can use the service at %s, %s; %s, or listen on 127.0.0.1",
        settings.exposed_address,
        settings.service.target,
        what,
        remedy,
    )
