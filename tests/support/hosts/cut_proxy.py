"""A TCP proxy that can stop forwarding and keep its connections open, as a network does whose cable was pulled."""

import asyncio
from contextlib import suppress


class CutProxy:
    """Forwards connections to a port of this machine."""

    def __init__(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.num_connections = 0
        """All that there were."""

    async def start(self, target: int) -> int:
        """Returns the port."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_connections += 1
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            try:
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target)
            except OSError:
                writer.close()
                return
            both = {writer, there_writer}
            self._writers |= both
            ways = [self._pump(reader, there_writer), self._pump(there_reader, writer)]
            await asyncio.gather(*ways)
            for each in both:
                each.close()
            self._writers -= both

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            await self._flowing.wait()
            writer.close()

    def cut(self) -> None:
        """Holds everything back from now on, ends of connections too."""
        self._flowing.clear()

    def heal(self) -> None:
        """Forwards again, what was held back too."""
        self._flowing.set()

    async def stop(self) -> None:
        self.heal()
        for writer in list(self._writers):
            writer.transport.abort()
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._serving)
