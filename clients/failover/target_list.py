"""A channel to the first of several targets that answers. The targets serve the same model."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from penstock.clients.channel import Tls, open_channel
from penstock.clients.health import is_serving

_OWN_LIST = re.compile("ipv[46]:")
"""gRPC's own lists of addresses, which it resolves to one target."""


def split_targets(target: str) -> list[str]:
    """Returns the targets in a list, separated by commas."""
    if _OWN_LIST.match(target):
        return [target]
    return [each.strip() for each in target.split(",") if each.strip()] or [target]


def open_targets(target: str, tls: Tls | None) -> "grpc.aio.Channel | TargetList":
    """Returns a channel to a target, or to the targets in a list, which connects on first use. Raises PenstockError if
    a file cannot be read or is missing."""
    targets = split_targets(target)
    if len(targets) == 1:
        return open_channel(targets[0], tls)
    # A balancer that is listed twice has another replica only for another connection.
    return TargetList([open_channel(each, tls, has_own_connection=True) for each in targets])


def channel_for_stream(channel: "grpc.aio.Channel | TargetList", avoid: object = None) -> grpc.aio.Channel:
    """Returns the channel for a new stream, of one target; not ``avoid`` if there is another one."""
    if not isinstance(channel, TargetList):
        return channel
    if avoid is not None:
        channel.leave(avoid)
    return channel.channel()


async def any_is_serving(
    channel: grpc.aio.Channel,
    metadata: tuple[tuple[str, str], ...] = (),
    *,
    timeout: float,  # noqa: ASYNC109 - gRPC keeps it
    wait_for_ready: bool = False,
) -> bool:
    """Whether the service is serving; of a list, whether any target is, which then becomes the current one: another one
    may be draining. For the arguments and exceptions see ``is_serving``."""
    for _ in range(len(channel) if isinstance(channel, TargetList) else 1):
        one = channel_for_stream(channel)
        if await is_serving(channel, metadata, timeout=timeout, wait_for_ready=wait_for_ready):
            return True
        if isinstance(channel, TargetList):
            channel.leave(one)
    return False


class TargetList(grpc.aio.Channel):
    """Makes every call at the current target, until that one is left or has lost its connection; then at the next."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._channels = channels
        self._current = 0
        self._was_ready = False
        """Whether the current target had a connection."""

    def __len__(self) -> int:
        return len(self._channels)

    def leave(self, channel: object) -> None:
        """Makes the next target the current one, if ``channel`` is that of the current one. Several streams may find
        out that it is gone."""
        if channel is self._channels[self._current]:
            self._move_on()

    def _move_on(self) -> None:
        self._current = (self._current + 1) % len(self._channels)
        self._was_ready = False

    def channel(self) -> grpc.aio.Channel:
        """Returns the channel for the next call: that of the current target, unless it is known to be gone."""
        for _ in self._channels:
            state = self._channels[self._current].get_state()
            is_gone = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
            if not is_gone and not (self._was_ready and state is not grpc.ChannelConnectivity.READY):
                self._was_ready = state is grpc.ChannelConnectivity.READY
                break
            self._move_on()
        return self._channels[self._current]

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        methods = [channel.unary_unary(*arguments, **options) for channel in self._channels]

        async def call(request: Any, *, wait_for_ready: bool = False, **call_options: Any) -> Any:
            """Calls one target after the other while there is no connection. ``wait_for_ready`` has no effect."""
            for number_left in reversed(range(len(methods))):
                channel = self.channel()
                method = methods[self._channels.index(channel)]
                try:
                    return await method(request, **call_options)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or not number_left:
                        raise
                self.leave(channel)
            raise AssertionError("the last target's error is raised")

        return call

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._at_current([channel.unary_stream(*arguments, **options) for channel in self._channels])

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._at_current([channel.stream_unary(*arguments, **options) for channel in self._channels])

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._at_current([channel.stream_stream(*arguments, **options) for channel in self._channels])

    def _at_current(self, methods: list[Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            return methods[self._channels.index(self.channel())](*arguments, **options)

        return call

    async def close(self, grace: float | None = None) -> None:
        for channel in self._channels:
            await channel.close(grace)

    async def __aenter__(self) -> "TargetList":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channels[self._current].get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channels[self._current].wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channels[self._current].channel_ready()
