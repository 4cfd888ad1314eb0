"""Loads LoRA adapters beside the steps: a thread reads and checks their files, and writes them into unused slots. If
steps use all cores, it does this between them."""

import logging
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue

from penstock.models.architecture.spec import ModelSpec
from penstock.models.backends.base import Backend
from penstock.models.checkpoint.checkpoint import check_checkpoint
from penstock.models.checkpoint.lora.adapter import read_adapter
from penstock.models.errors import ModelError
from penstock.models.executor.priority import lower_priority
from penstock.models.worker.turns import Turns
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded
from penstock.scheduler.worker_config import WorkerConfig

logger = logging.getLogger(__name__)


class AdapterThread:
    """Loads adapters one after the other, at a low priority, so that steps keep their time. The thread starts with the
    first load."""

    def __init__(self, config: WorkerConfig, backend: Backend, send: Callable[[AdapterLoaded], None]) -> None:
        """``send`` gets the answers, on the thread. It may raise OSError, which ends the thread."""
        self._config = config
        self._backend = backend
        self._send = send
        self.turns = Turns()
        """The thread that computes steps enters ``turns.step``, unless a GPU computes them."""
        self._loads: SimpleQueue[AdapterLoad] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def load(self, load: AdapterLoad) -> None:
        """Queues a load."""
        self._loads.put(load)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        lower_priority(threading.get_native_id())
        while True:
            answer = self._answer(self._loads.get())
            try:
                self._send(answer)
            except OSError:
                return  # the service is gone

    def _answer(self, load: AdapterLoad) -> AdapterLoaded:
        try:
            return load_adapter(self._backend, self._spec, self._config.max_lora_rank, load, self.turns.wait)
        except Exception as error:  # without an answer, this load and all later ones would wait forever
            logger.exception("%s: the adapter was not loaded", load.path)
            return AdapterLoaded(error=f"{load.path}: {error}"[:500])
        finally:
            self.turns.end()

    @cached_property
    def _spec(self) -> ModelSpec:
        # The model's files passed this check before; only the shapes of its linears matter here.
        return check_checkpoint(Path(self._config.model), weights=False).spec


def load_adapter(
    backend: Backend, spec: ModelSpec, max_rank: int, load: AdapterLoad, wait_turn: Callable[[], None] = lambda: None
) -> AdapterLoaded:
    """Checks an adapter's files, and writes it into its slot unless that is 0. Calls ``wait_turn`` before each piece of
    work."""
    try:
        adapter = read_adapter(Path(load.path), spec, max_rank, wait_turn)
        if load.digest and adapter.digest != load.digest:
            raise ModelError(f"{load.path}: its files have changed since it was loaded: unload it, then load it again")
        if load.slot:
            backend.load_adapter(load.slot, adapter)
        elif not load.digest:  # else its numbers were checked when it was loaded
            for _ in adapter.matrices():
                pass
    except ModelError as error:
        return AdapterLoaded(error=" ".join(str(error).split())[:500])
    except MemoryError:
        return AdapterLoaded(error=f"{load.path}: memory ran out while it was read")
    return AdapterLoaded(adapter.rank, adapter.digest)
