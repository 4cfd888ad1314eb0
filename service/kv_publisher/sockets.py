"""The thread that sends batches over ZeroMQ: a PUB socket for all subscribers, and a ROUTER socket that replays batches
to a subscriber that missed some.

The frames are vLLM's. A message has the topic, the number of the batch in 8 bytes (big-endian), and the payload. A
replay request has an empty frame and the number of the first batch. The answer is these batches, each with an empty
frame before its own frames, and at the end a message with the number -1 and no payload.

No subscriber can block the thread: PUB drops messages for a slow subscriber, which sees a gap in the numbers, and an
answer pauses until its subscriber has read more.
"""

import logging
import os
import time
from threading import Thread
from typing import Any

import zmq

from penstock.service.config.addresses import ListenError
from penstock.service.config.kv_events import KvEventsConfig
from penstock.service.kv_publisher.history import BatchHistory

_log = logging.getLogger(__name__)

NUMBER_BYTES = 8
END_NUMBER = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""The number in the last message of an answer."""
MAX_REPLAYS = 64
"""The maximum number of concurrent answers; further requests are ignored."""
PORTION = 64
"""The number of batches of an answer that are sent before newer batches are published, and that wait unread."""
BUSY_POLL_MS = 10
FLUSH_MS = 200
"""How long sending the last messages may take."""
PATIENCE_S = 30.0
"""An answer ends if its subscriber reads nothing for this long."""
_WARN_EVERY_S = 60.0


class _Replay:
    """An answer that is being sent."""

    def __init__(self, envelope: list[bytes], first: int, end: int) -> None:
        self.envelope = envelope
        self.next = first
        self.end = end
        """The number after the last batch."""
        self.moved_at = time.monotonic()


class PublisherSockets:
    """Binds the sockets, and serves them in a thread until ``close``."""

    def __init__(self, config: KvEventsConfig, history: BatchHistory) -> None:
        """Raises ListenError."""
        self._history = history
        self._topic = config.topic.encode()
        self._context = zmq.Context(1)
        self._is_closing = False
        self._replays: dict[bytes, _Replay] = {}
        self._num_warned, self._warned_at = 0, -_WARN_EVERY_S
        self._warned_of_request_at = -_WARN_EVERY_S
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.replay_endpoint: str | None = None
        """The address for replay requests, with the bound port."""
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._replayer = self._context.socket(zmq.ROUTER)
            self._publisher.setsockopt(zmq.SNDHWM, config.hwm)
            self.endpoint = _open(self._publisher, config.endpoint, "endpoint", may_connect=True)
            """The address for subscriptions, with the bound port."""
            if config.replay_endpoint is not None:
                self._replayer.setsockopt(zmq.SNDHWM, PORTION)
                self._replayer.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.replay_endpoint = _open(self._replayer, config.replay_endpoint, "replay_endpoint")
            self._thread = Thread(target=self._run, name="penstock-kv-events", daemon=True)
            self._thread.start()
        except BaseException:
            self._close_sockets()
            os.close(self._wakes)
            raise

    def wake(self) -> None:
        """Makes the thread publish new batches."""
        os.eventfd_write(self._wakes, 1)

    def close(self) -> None:
        """Publishes the waiting batches, and closes the sockets."""
        self._is_closing = True
        self.wake()
        self._thread.join()
        os.close(self._wakes)

    def _close_sockets(self) -> None:
        self._context.destroy(linger=FLUSH_MS)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        if self.replay_endpoint is not None:
            poller.register(self._replayer, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(BUSY_POLL_MS if self._replays else None))
                if self._wakes in ready:
                    os.eventfd_read(self._wakes)
                if self._replayer in ready:
                    self._take_requests()
                while (batch := self._history.take_unpublished()) is not None:
                    number, payload = batch
                    self._publisher.send_multipart((self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload))
                self._warn_of_drops()
                if self._is_closing:
                    return
                for identity, replay in list(self._replays.items()):
                    if not self._send_portion(replay):
                        del self._replays[identity]
        except Exception:
            _log.exception("KV events are no longer published")
        finally:
            self._close_sockets()

    def _take_requests(self) -> None:
        for _ in range(PORTION):  # any more are taken after newer batches are published
            try:
                frames = self._replayer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            *envelope, first = frames
            if len(frames) != 3 or envelope[1] or len(first) != NUMBER_BYTES:
                self._warn_of_request()
            elif len(self._replays) < MAX_REPLAYS or envelope[0] in self._replays:
                number = int.from_bytes(first, "big")
                self._replays[envelope[0]] = _Replay(envelope, number, self._history.num_published)

    def _send_portion(self, replay: _Replay) -> bool:
        """Sends a portion of an answer; returns whether there is more."""
        now = time.monotonic()
        try:
            for _ in range(PORTION):
                batch = self._history.find_from(replay.next)
                if batch is None or batch[0] >= replay.end:
                    self._replayer.send_multipart((*replay.envelope, b"", END_NUMBER, b""), zmq.NOBLOCK)
                    return False
                number, payload = batch
                frames = (*replay.envelope, self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload)
                self._replayer.send_multipart(frames, zmq.NOBLOCK)
                replay.next, replay.moved_at = number + 1, now
        except zmq.Again:  # the subscriber must read more first
            return now - replay.moved_at < PATIENCE_S
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:  # the subscriber has disconnected
                return False
            raise
        return True

    def _warn_of_request(self) -> None:
        now = time.monotonic()
        if now - self._warned_of_request_at >= _WARN_EVERY_S:
            _log.warning("a request for KV events is ignored: it must have an empty frame and a number of 8 bytes")
            self._warned_of_request_at = now

    def _warn_of_drops(self) -> None:
        num_dropped, now = self._history.num_dropped, time.monotonic()
        if num_dropped > self._num_warned and now - self._warned_at >= _WARN_EVERY_S:
            _log.warning(
                "KV events: %d batches were not published, because too many were waiting; subscribers see a gap",
                num_dropped - self._num_warned,
            )
            self._num_warned, self._warned_at = num_dropped, now


def _open(socket: "zmq.Socket[Any]", endpoint: str, key: str, *, may_connect: bool = False) -> str:
    """Binds or connects a socket; returns its address. Raises ListenError."""
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        if may_connect and not listens(endpoint):
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ListenError(
            f"--kv-events-config: {key}: cannot listen on {endpoint} ({error.strerror}); choose another address, or "
            "stop the program that uses it"
        ) from None
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound.rstrip("\0")


def check_endpoints(config: KvEventsConfig) -> None:
    """Raises ListenError if the service cannot listen on an address, before anything slow starts."""
    with zmq.Context(1) as context:
        for key, endpoint in (("endpoint", config.endpoint), ("replay_endpoint", config.replay_endpoint)):
            if endpoint is not None and (key != "endpoint" or listens(endpoint)):
                with context.socket(zmq.PUB) as socket:
                    _open(socket, endpoint, key)


def listens(endpoint: str) -> bool:
    """Returns whether the service listens on an address, rather than connects to it."""
    return endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint or endpoint.endswith(":0")
