"""The worker process: loads a model, runs plans strictly in order and returns a result for each. Started by ``spawn``
with an inherited socket; ends when that closes, or with its parent. All its state can be rebuilt."""

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from penstock.models.backends.base import load_backend, load_stage
from penstock.models.backends.tensor_parallel import PeerLost
from penstock.models.errors import ModelError
from penstock.models.executor.child_process import WORKER, prepare_child
from penstock.models.executor.log_format import set_up_logging
from penstock.models.executor.wire import Channel, FrameKind, WireError
from penstock.models.worker.adapter_thread import AdapterThread
from penstock.models.worker.meeting import open_meeting
from penstock.models.worker.runner import Runner
from penstock.models.worker.speculation import check_speculation, make_controller
from penstock.scheduler.plan import AdapterLoad, PromptLogprobsPart, StepPlan, StepResult
from penstock.scheduler.worker_config import WorkerConfig

logger = logging.getLogger(__name__)

ALIVE_INTERVAL_S = 0.5
PEER_LOST_S = 3.0
"""How long the service has to see which other rank ended, and to end this one too."""
PR_SET_PDEATHSIG = 1

MAX_PARTS_BYTES = 64 << 10
"""The approximate limit of prompt log-probabilities per frame: decoding one blocks the service's event loop."""
TOKEN_BYTES = 14
"""The encoded size of one log-probability with its token id."""


def main() -> None:
    """Runs a worker. The arguments are the descriptor of the socket and the parent's process id."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Terminals and service managers send these to all processes at once; the service decides when this one ends.
        signal.signal(number, signal.SIG_IGN)
    prepare_child(WORKER)
    faulthandler.enable()
    with socket.socket(fileno=descriptor) as connection:
        code = serve(Channel(connection))
    logging.shutdown()
    # Not ``sys.exit``: threads may be in a native library, which crashes if the interpreter is gone when it returns.
    os._exit(code)


def serve(channel: Channel) -> int:
    """Serves frames until the service closes its end. Returns the exit code."""
    frames = channel.frames()
    kind, config = next(frames, (None, None))
    if kind is None:
        return 0
    assert isinstance(config, WorkerConfig), "the first frame is the config"
    # To the service's own stderr, in its format.
    set_up_logging(config.log_format, config.log_level, holds_texts=False)
    try:
        with _alive(channel):
            if config.only_computes_layers:
                _serve_stage(channel, config, frames)
            config = open_meeting(check_speculation(config), channel)
            grammars = None
            if config.tokenizer is not None:  # other workers do not need the grammar library
                from penstock.models.structured_output.manager import grammars_of

                grammars = grammars_of(config)
            backend = load_backend(config)
            runner = Runner(backend, make_controller(config, backend), grammars)
            runner.warm()
            measured = tuple(runner.measure_steps()) if config.measures_steps else ()
            backend.prefault()
            gc.freeze()
            channel.send(FrameKind.FACTS, msgspec.structs.replace(backend.facts, measured_steps=measured))
            adapters = AdapterThread(config, backend, partial(channel.send, FrameKind.ADAPTER))
            _run_plans(channel, runner, frames, adapters, is_heard=config.tensor_parallel_rank == 0)
        return 0
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the service is gone
    except ModelError as error:
        failure = str(error)
    except PeerLost as error:
        # The lost rank reports the cause; a message from here would only arrive before it.
        channel.wait_closed(PEER_LOST_S)
        failure = f"another rank is lost: {error}"
    except Exception as error:
        logger.critical("the worker failed", exc_info=True)
        failure = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    with contextlib.suppress(OSError):
        channel.send(FrameKind.FAILED, failure)
    return 1


def _serve_stage(channel: Channel, config: WorkerConfig, frames: Iterator[tuple[FrameKind, object]]) -> NoReturn:
    """Serves a rank that computes layers for rank 0. It gets no plans, and ends when the service closes its end."""
    threading.Thread(target=_end_after, args=(frames,), name="end", daemon=True).start()
    stage = load_stage(config)
    gc.freeze()
    channel.send(FrameKind.FACTS, stage.facts)
    stage.serve()


def _end_after(frames: Iterator[tuple[FrameKind, object]]) -> None:
    for _ in frames:
        pass
    os._exit(0)


def _run_plans(
    channel: Channel,
    runner: Runner,
    frames: Iterator[tuple[FrameKind, object]],
    adapters: AdapterThread,
    is_heard: bool,
) -> None:
    """Runs plans until there are no more. Reads and decodes the next plan while one computes, and also starts it if the
    backend computes without this thread. Without ``is_heard``, sends no results."""
    plans: SimpleQueue[StepPlan | Exception | None] = SimpleQueue()
    threading.Thread(target=_read_plans, args=(frames, plans, adapters), name="plans", daemon=True).start()
    answers = _Answers(plans, partial(_send_result, channel) if is_heard else lambda result: None)
    if runner.runs_ahead:
        threading.Thread(target=answers.send_all, name="answers", daemon=True).start()
    while (plan := plans.get()) is not None:
        if isinstance(plan, Exception):
            raise plan
        if runner.runs_ahead:
            answers.expect(runner.start_step, plan)
            continue
        with adapters.turns.step():
            answers.expect(runner.start_step, plan)
            answers.send_next()


class _Answers:
    """Sends the results of started plans in order, with the time that the worker was idle before each."""

    def __init__(self, plans: "SimpleQueue[StepPlan | Exception | None]", send: Callable[[StepResult], None]) -> None:
        self._plans = plans
        self._send = send
        self._due: SimpleQueue[tuple[int, Callable[[], StepResult]]] = SimpleQueue()
        self._counting = threading.Lock()
        self._num_due = 0
        self._idle_since: int | None = time.monotonic_ns()
        """When the worker became idle; None if the next plan was already there."""

    def expect(self, begin: Callable[[StepPlan], Callable[[], StepResult]], plan: StepPlan) -> None:
        with self._counting:
            waits = self._num_due == 0 and self._idle_since is not None
            waited_us = (time.monotonic_ns() - (self._idle_since or 0)) // 1000 if waits else 0
            self._num_due += 1
        self._due.put((waited_us, begin(plan)))

    def send_next(self) -> None:
        """Waits for the oldest result and sends it."""
        waited_us, finish = self._due.get()
        result = finish()
        result.waited_us = waited_us
        with self._counting:
            self._num_due -= 1
            # If the service needs this result to make the next plan, the worker is idle from here on.
            self._idle_since = time.monotonic_ns() if self._plans.empty() else None
        self._send(result)

    def send_all(self) -> None:
        """Runs on its own thread until something fails, which then ends the worker."""
        try:
            while True:
                self.send_next()
        except Exception as error:
            self._plans.put(error)


def _read_plans(
    frames: Iterator[tuple[FrameKind, object]],
    plans: "SimpleQueue[StepPlan | Exception | None]",
    adapters: AdapterThread,
) -> None:
    try:
        for kind, plan in frames:
            if isinstance(plan, AdapterLoad):
                adapters.load(plan)
                continue
            if not isinstance(plan, StepPlan):
                raise WireError(f"got a {kind.name} frame instead of a plan")
            plans.put(plan)
    except (WireError, OSError) as error:
        plans.put(error)
    else:
        plans.put(None)


def _send_result(channel: Channel, result: StepResult) -> None:
    """Sends a result. Long prompt log-probabilities go before it in separate frames."""
    pending: list[PromptLogprobsPart] = []
    size = 0
    for part in _bounded(result.prompt_logprobs):
        if pending and size + _part_bytes(part) > MAX_PARTS_BYTES:
            channel.send(FrameKind.PROMPT_LOGPROBS, pending)
            pending, size = [], 0
        pending.append(part)
        size += _part_bytes(part)
    result.prompt_logprobs = pending
    channel.send(FrameKind.RESULT, result)


def _part_bytes(part: PromptLogprobsPart) -> int:
    return TOKEN_BYTES * (len(part.logprobs.chosen) + len(part.logprobs.top))


def _bounded(parts: list[PromptLogprobsPart]) -> Iterator[PromptLogprobsPart]:
    """Splits parts so that each fits in a frame."""
    for part in parts:
        step = max(1, MAX_PARTS_BYTES // (TOKEN_BYTES * (1 + part.logprobs.num_top)))
        for begin in range(0, len(part.logprobs.chosen), step):
            logprobs = part.logprobs.part(begin, begin + step)
            yield PromptLogprobsPart(part.row, part.epoch, part.start + begin, logprobs)


@contextlib.contextmanager
def _alive(channel: Channel) -> Iterator[None]:
    """Sends a heartbeat every 500 ms, whatever the process computes."""
    over = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(ALIVE_INTERVAL_S):
                channel.send(FrameKind.ALIVE, None)

    thread = threading.Thread(target=send, name="alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, even if it ended before this call."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
