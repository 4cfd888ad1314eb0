"""Loads LoRA adapters through the executor, for operators and for requests that wait for one. Runs on the engine's
event loop."""

import asyncio
import logging
from collections.abc import Callable

from penstock.scheduler.adapters import Adapter
from penstock.scheduler.executor import Executor, ExecutorError
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded
from penstock.scheduler.request import EngineFinishReason

logger = logging.getLogger(__name__)


class AdapterError(Exception):
    """An adapter cannot be loaded. The message contains the reason, and a remedy."""


class AdapterLoader:
    """Loads adapters while the engine serves."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        abort: Callable[[str, EngineFinishReason, str], bool],
        pump: Callable[[], None],
    ) -> None:
        """``abort`` ends a request, and ``pump`` makes new plans: requests waited for the adapter."""
        self._executor, self._scheduler = executor, scheduler
        self._abort, self._pump = abort, pump
        self.slots = scheduler.adapters
        self.slots.start_load = self._start
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, name: str, path: str) -> Adapter:
        """Checks an adapter, and loads it if a slot is free; otherwise the first request that needs it does. Raises
        AdapterError, and ExecutorError if the worker is gone."""
        adapter = Adapter(name, path)
        await self._load(adapter, self.slots.take_free(adapter))
        return adapter

    async def check_files(self, adapter: Adapter) -> None:
        """Raises AdapterError unless the adapter's files are those that were loaded. Raises ExecutorError if the worker
        is gone."""
        await self._answer(adapter, slot=0)

    def busy(self) -> tuple[list[str], list[str]]:
        """Returns the names of the adapters with running rows, and of those for which a request waits to begin."""
        running, waiting = set[str](), set[str]()
        for live in self._scheduler.requests.values():
            if (adapter := live.request.adapter) is not None:
                if adapter.num_rows:
                    running.add(adapter.name)
                if live.started_at is None:
                    waiting.add(adapter.name)
        return sorted(running), sorted(waiting)

    def unload(self, adapter: Adapter) -> None:
        """Frees the adapter's slot, unless requests need it: then it becomes free like any other."""
        if not any(live.request.adapter is adapter for live in self._scheduler.requests.values()):
            self.slots.retire(adapter)
            self._pump()

    async def _load(self, adapter: Adapter, slot: int) -> None:
        is_loaded = False
        try:
            answer = await self._answer(adapter, slot)
            adapter.digest, adapter.rank, is_loaded = answer.digest, answer.rank, True
        finally:
            self.slots.end_load(adapter, slot, is_loaded=is_loaded)

    async def _answer(self, adapter: Adapter, slot: int) -> AdapterLoaded:
        answer = await self._executor.load_adapter(AdapterLoad(slot, adapter.path, adapter.digest))
        if answer.error:
            raise AdapterError(answer.error)
        return answer

    def _start(self, adapter: Adapter, slot: int) -> None:
        task = asyncio.get_running_loop().create_task(self._load_awaited(adapter, slot), name="load of an adapter")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_awaited(self, adapter: Adapter, slot: int) -> None:
        try:
            await self._load(adapter, slot)
        except ExecutorError:
            return  # the requests wait for the next worker, which loads it again
        except AdapterError as error:
            logger.error("adapter %s: %s", adapter.name, error)
            for request_id, live in list(self._scheduler.requests.items()):
                if live.request.adapter is adapter:
                    self._abort(request_id, EngineFinishReason.ADAPTER_FAILED, str(error))
        self._pump()
