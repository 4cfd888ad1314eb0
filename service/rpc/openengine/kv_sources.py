"""GetKvEventSources: where KV events are published over ZeroMQ."""

import socket
from ipaddress import ip_address

from openengine.v1 import kv_pb2 as oe

from penstock.service.kv_publisher.publisher import KvEventPublisher


def kv_sources(publisher: KvEventPublisher | None) -> list[oe.KvEventSource]:
    """Returns the publisher as a source; none if there is no publisher, or other machines and programs cannot connect
    to it by host and port."""
    if publisher is None or not publisher.listens:
        return []
    endpoint = _address(publisher.endpoint)
    if endpoint is None:
        return []
    config = publisher.config
    replay = None if publisher.replay_endpoint is None else _address(publisher.replay_endpoint)
    return [
        oe.KvEventSource(
            transport="zmq",
            endpoint_addr=endpoint,
            topic=config.topic,
            replay_endpoint="" if replay is None else f"tcp://{replay.host}:{replay.port}",
            data_parallel_rank=0,
            encoding="msgpack",
            buffer_steps=config.buffer_steps if replay is not None else 0,
            hwm=config.hwm,
            max_queue_size=config.max_queue_size,
        )
    ]


def _address(endpoint: str) -> oe.KvEndpoint | None:
    """Returns the host and port of a TCP endpoint; for a wildcard, the address from which this machine would call
    others. None if there is none."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp":
        return None
    host = host.strip("[]")
    if host == "*" or _is_wildcard(host):
        found = _own_address()
        if found is None:
            return None
        host = found
    return oe.KvEndpoint(host=host, port=int(port), protocol="tcp")


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _own_address() -> str | None:
    """Returns the address of the interface with the default route. Connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation
        except OSError:
            return None
        host: str = probe.getsockname()[0]
        return host
