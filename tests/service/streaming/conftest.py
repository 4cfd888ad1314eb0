"""Outboxes over a writer that records what it is given."""

import asyncio

import pytest

import penstock.v1 as pb
from penstock.service.streaming.buffer_budget import BufferBudget, WritePacer
from penstock.service.streaming.messages import stream_messages
from penstock.service.streaming.outbox import Outbox


class Writer:
    """Takes messages at once while ``open`` is set."""

    def __init__(self):
        self.messages = []
        self.stalls = []
        self.pace = None
        """Set for each message that it takes, where it is not None."""
        self.open = asyncio.Event()
        self.open.set()

    async def write(self, raw):
        self.messages.append(pb.GenerateResponse.FromString(raw))
        await asyncio.sleep(0)
        await self.open.wait()
        if (pace := self.pace) is not None:
            await pace.wait()
            pace.clear()


@pytest.fixture
async def make_outbox():
    """Makes an outbox, its writer and the task of its ``run``."""
    tasks = []

    def make(pacer=None, heartbeat_s=60.0, run=True, buffer_budget=None):
        writer = Writer()
        outbox = Outbox(
            writer.write,
            stream_messages,
            pacer or WritePacer(),
            buffer_budget or BufferBudget(),
            lambda: pb.SERVICE_STATE_SERVING,
            writer.stalls.append,
            heartbeat_s,
        )
        task = asyncio.create_task(outbox.run()) if run else None
        if task is not None:
            tasks.append(task)
        return outbox, writer, task

    yield make
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
