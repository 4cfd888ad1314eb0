"""Checks whether a service can be reached, and if not, which step fails: the address, TLS, certificates, the key.

gRPC reports little more than "unavailable" for all of these, so each step is tried separately.
"""

import asyncio
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass

import grpc

from penstock.clients.channel import Tls
from penstock.clients.cli.options import KEY_VARIABLE, ConnectionOptions, ssl_context
from penstock.clients.client import AsyncClient
from penstock.clients.errors import RequestFailed

STEP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Reached:
    """The result of a check."""

    problem: str
    """The problem; empty if there is none."""
    remedy: str
    model: str = ""
    version: str = ""


def reach(service: ConnectionOptions) -> Reached:
    """Checks each step up to a call."""
    return _connect(service) or asyncio.run(_call(service))


def _connect(service: ConnectionOptions) -> Reached | None:
    """Returns why there is no connection, or None if there is one."""
    try:
        with _open(service.target) as plain:
            if service.tls is not None:
                return _shake_hands(plain, service.tls, service.tls.server_name or _host_port(service.target)[0])
        if not service.target.startswith("unix:") and _speaks_tls(service.target):
            return Reached(
                "the service requires TLS",
                "pass --tls, and --tls-ca FILE if the certificate is from your own CA",
            )
    except OSError as error:
        return Reached(
            f"cannot connect to {service.target}: {error.strerror or error}",
            "check the address, that penstock serve runs there, and that it does not listen only on 127.0.0.1",
        )
    return None


def _shake_hands(plain: socket.socket, tls: Tls, name: str) -> Reached | None:
    context = ssl_context(tls)
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain, server_hostname=name) as secured:
            if not secured.recv(1):  # the service's first bytes, or its refusal of the client's certificate
                return _refused("closed without a reason")
    except ssl.SSLCertVerificationError as error:
        return Reached(
            f"the service's certificate is not trusted: {error.verify_message}",
            "pass the CA's file with --tls-ca, and the name in the certificate with --tls-server-name",
        )
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "ALERT" in reason:
            return _refused(reason.replace("_", " ").lower())
        return Reached("the server at this address does not use TLS", "leave out --tls and the other TLS flags")
    except ConnectionResetError as error:
        return _refused(error.strerror or "connection reset")
    except TimeoutError:
        return Reached("the server at this address does not respond", "check that it is a penstock service")
    return None


def _refused(how: str) -> Reached:
    return Reached(
        f"the service refuses the connection: {how}",
        "it may require a client certificate from a CA that it trusts: pass --tls-cert and --tls-key",
    )


async def _call(service: ConnectionOptions) -> Reached:
    try:
        async with AsyncClient(service.target, api_key=service.api_key, tls=service.tls) as client:
            model = await asyncio.wait_for(client.model(), STEP_TIMEOUT_S)
    except RequestFailed as failure:
        if failure.code is grpc.StatusCode.UNAUTHENTICATED:
            return Reached(failure.message, f"pass a key or a token with --api-key-file FILE or in ${KEY_VARIABLE}")
        return Reached(str(failure), "check that this is a penstock service, and not its admin listener")
    except TimeoutError:
        return Reached("connected, but the service does not respond", "check the service's log and load")
    return Reached("", "", model.name, model.version)


def _open(target: str) -> socket.socket:
    if target.startswith("unix:"):
        opened = socket.socket(socket.AF_UNIX)
        opened.settimeout(STEP_TIMEOUT_S)
        try:
            opened.connect(target.removeprefix("unix:"))
        except OSError:
            opened.close()
            raise
        return opened
    return socket.create_connection(_host_port(target), STEP_TIMEOUT_S)


def _speaks_tls(target: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with _open(target) as plain:
        plain.settimeout(1.0)
        with suppress(OSError), context.wrap_socket(plain):
            return True
    return False


def _host_port(target: str) -> tuple[str, int]:
    host, colon, port = target.removeprefix("dns:///").removeprefix("dns:").rpartition(":")
    if not (colon and port.isdigit()):
        return target.strip("[]"), 443  # gRPC's default
    return host.strip("[]"), int(port)
