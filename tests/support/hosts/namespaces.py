"""Two network namespaces on this machine, each like a host with its own network, and what joins them: a veth pair, or a
relay that delays and loses packets."""

import fcntl
import heapq
import os
import random
import selectors
import shutil
import struct
import subprocess
import threading
import time
from contextlib import suppress

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def missing() -> str:
    """Why namespaces cannot be made; empty if they can."""
    if shutil.which("ip") is None:
        return "needs the command ip (Debian: iproute2)"
    name = f"penstock-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


class TwoHosts:
    """The namespaces. Commands run in one by ``prefix``."""

    def __init__(self, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """With a delay or a loss, for each way, a relay joins them in place of the veth pair."""
        self.names = [f"penstock-{os.getpid()}-{host}" for host in "ab"]
        self._relay: PacketRelay | None = None
        for name in self.names:
            _ip("netns", "add", name)
        if delay_s or loss:
            self.links = [f"pt{os.getpid() % 100000}{host}" for host in "ab"]
            self._relay = PacketRelay(self.links, delay_s, loss)
            for link, name in zip(self.links, self.names, strict=True):
                _ip("link", "set", link, "netns", name)
        else:
            self.links = [f"pv{os.getpid() % 100000}{host}" for host in "ab"]
            first, second = self.links
            peer = ["peer", "name", second, "netns", self.names[1]]
            _ip("link", "add", first, "netns", self.names[0], "type", "veth", *peer)
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
        if self._relay is not None:
            self._relay.start()

    def prefix(self, host: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.names[host])

    def cut(self) -> None:
        _ip("-n", self.names[0], "link", "set", self.links[0], "down")

    def heal(self) -> None:
        _ip("-n", self.names[0], "link", "set", self.links[0], "up")

    def close(self) -> None:
        if self._relay is not None:
            self._relay.stop()
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


class PacketRelay:
    """Passes packets between two TUN devices, each after a delay, and loses some."""

    def __init__(self, names: list[str], delay_s: float, loss: float) -> None:
        self._devices = [_open_tun(name) for name in names]
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(7)
        self._stop_reading, self._stop_writing = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        os.write(self._stop_writing, b"x")
        self._thread.join()
        for descriptor in (*self._devices, self._stop_reading, self._stop_writing):
            os.close(descriptor)

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        for descriptor in (*self._devices, self._stop_reading):
            selector.register(descriptor, selectors.EVENT_READ)
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        while True:
            timeout = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
            for key, _ in selector.select(timeout):
                if key.fd == self._stop_reading:
                    return
                packet = os.read(key.fd, 1 << 16)
                if self._random.random() >= self._loss:
                    other = self._devices[1 - self._devices.index(key.fd)]
                    number += 1
                    heapq.heappush(waiting, (time.monotonic() + self._delay_s, number, other, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, other, packet = heapq.heappop(waiting)
                with suppress(OSError):  # the device is down
                    os.write(other, packet)


def _open_tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
