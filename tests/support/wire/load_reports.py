"""Reads load reports from trailers. grpcio hides them from applications: its core reads them for its own balancers."""

import struct
from collections.abc import Mapping
from typing import Any

import grpc
from wire.raw_http2 import SETTINGS, frame, raw_client

from penstock.v1 import orca

_TRUE_BINARY = 0xFE03
"""The setting with which gRPC sends binary metadata unencoded instead of in base64."""
_CODES = {str(code.value[0]): code for code in grpc.StatusCode}


async def end_of(
    target: str, path: str, *messages: bytes, metadata: Mapping[str, str] | None = None
) -> tuple[grpc.StatusCode, Any]:
    """Makes a call with these messages, and half-closes it. Returns its code and the only report in its trailers."""
    async with raw_client(target, window=1 << 24) as client:
        client.send(frame(SETTINGS, struct.pack(">HI", _TRUE_BINARY, 1)))
        stream = client.begin(path, metadata)
        body = b"".join(b"\0" + struct.pack(">I", len(message)) + message for message in messages)
        if body:
            await client.put(stream, body, ends=True)
        else:
            client.send(frame(0, b"", stream, 1))
        code = _CODES[await client.end(stream)]
        [raw] = _values(client.details[stream], orca.TRAILER)
        return code, orca.OrcaLoadReport.FromString(raw)


def _values(block: bytes, name: str) -> list[bytes]:
    """The values of a binary header in a block that uses no table and no compression."""
    values = []
    for part in block.split(name.encode())[1:]:
        size, at = part[0] & 127, 1
        if size == 127:
            shift = 0
            while True:
                size += (part[at] & 127) << shift
                shift, at = shift + 7, at + 1
                if part[at - 1] < 128:
                    break
        assert part[at] == 0, "the value is encoded"
        values.append(part[at + 1 : at + size])
    return values
