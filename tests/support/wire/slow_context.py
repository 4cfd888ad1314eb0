"""A client that reads slowly, for servicers that are called without a server."""

import asyncio
from typing import Any


class SlowContext:
    """The context of a call whose client reads only as many messages as the test allows."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.room = asyncio.Semaphore(0)
        """How many more messages the client reads."""

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, message: Any) -> None:
        await self.room.acquire()
        self.messages.append(message)
