"""Plain connections to a gateway, for requests that no HTTP client would send."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any


@contextlib.asynccontextmanager
async def connected(gateway: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a TCP connection to the gateway of a test."""
    base = gateway.http.base_url
    async with asyncio.timeout(120):
        reader, writer = await asyncio.open_connection(base.host, base.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
