"""Shared flags of the terminal tools: the connection to a service, and request options given as text."""

import argparse
import json
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock.clients.channel import DEFAULT_TARGET, Tls
from penstock.clients.cli.command_parser import reporting
from penstock.clients.errors import InvalidOption, PenstockError, RequestFailed, Unreachable
from penstock.clients.requests import start_from_line

TARGET_VARIABLE = "PENSTOCK_TARGET"
ADMIN_VARIABLE = "PENSTOCK_ADMIN"
KEY_VARIABLE = "PENSTOCK_API_KEY"
_OF_KEY = f"file with the API key (default: the key in ${KEY_VARIABLE}, if set)"
DEFAULT_ADMIN = "127.0.0.1:50052"
"""The default address of the admin listener of ``penstock serve``."""


@dataclass(frozen=True)
class ConnectionOptions:
    """The address of a service and how to connect: the arguments of a client."""

    target: str
    api_key: str | None = None
    tls: Tls | None = None


def add_connection_flags(
    parser: argparse.ArgumentParser, of_target: str, flag: str = "--target", of_key: str | None = _OF_KEY
) -> None:
    """Adds ``--target``, with the help text ``of_target``, and the flags that ``connection`` reads; ``of_key`` is the
    help text of the key's flag, which is left out if it is None."""
    flags = parser.add_argument_group("the service")
    flags.add_argument(flag, metavar="HOST:PORT", help=of_target)
    if of_key is not None:
        flags.add_argument("--api-key-file", type=Path, metavar="FILE", help=of_key)
    flags.add_argument("--tls", action="store_true", help="use TLS; implied by each of the flags below")
    flags.add_argument("--tls-ca", type=Path, metavar="FILE", help="certificates to trust (default: the system's)")
    flags.add_argument("--tls-cert", type=Path, metavar="FILE", help="the client's own certificate")
    flags.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    flags.add_argument("--tls-server-name", metavar="NAME", help="the name to expect in the service's certificate")


def connection(arguments: argparse.Namespace, target: str) -> ConnectionOptions:
    """Reads the flags and the environment. Raises PenstockError if one of the files cannot be used."""
    return ConnectionOptions(target, _api_key(arguments.api_key_file), tls_options(arguments))


def tls_options(arguments: argparse.Namespace) -> Tls | None:
    """Reads the flags for TLS; None without TLS. Raises PenstockError for unusable files, which gRPC would report as an
    unreachable service."""
    ca, certificate, key = arguments.tls_ca, arguments.tls_cert, arguments.tls_key
    for flag, path in (("--tls-ca", ca), ("--tls-cert", certificate), ("--tls-key", key)):
        if path is not None:
            _read(flag, path)
    if (certificate is None) != (key is None):
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise PenstockError(f"{given}: needs {missing} as well: set both or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except OSError:  # an SSLError is one
            raise PenstockError(f"--tls-ca: {ca} contains no PEM certificate; check the file") from None
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key, password="")
        except OSError:  # an SSLError is one
            raise PenstockError(
                f"--tls-cert, --tls-key: {certificate} and {key} cannot be used; they must be a certificate and its "
                "own private key, both in PEM, the key without a passphrase"
            ) from None
    tls = Tls(ca, certificate, key, arguments.tls_server_name)
    return tls if any((arguments.tls, *vars(tls).values())) else None


def ssl_context(tls: Tls) -> ssl.SSLContext:
    """Returns ``tls`` as the standard library takes it. Raises OSError for unusable files."""
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


def add_admin_flags(parser: argparse.ArgumentParser, of_key: str | None = _OF_KEY) -> None:
    """Adds ``--admin``, and the flags that ``admin_connection`` reads."""
    add_connection_flags(
        parser,
        f"address of the service's admin listener, or unix:PATH (default: ${ADMIN_VARIABLE}, or {DEFAULT_ADMIN})",
        "--admin",
        of_key,
    )


def admin_connection(arguments: argparse.Namespace) -> ConnectionOptions:
    """Reads the flags and the environment for the admin listener. Raises PenstockError."""
    return connection(arguments, admin_target(arguments))


def admin_target(arguments: argparse.Namespace) -> str:
    """Returns the admin listener's address from the flag, the environment, or else this machine's."""
    return arguments.admin or os.environ.get(ADMIN_VARIABLE) or DEFAULT_ADMIN


@contextmanager
def advised() -> Iterator[None]:
    """Adds to failures which of these flags may help. Raises PenstockError."""
    try:
        yield
    except RequestFailed as failure:
        if failure.code is grpc.StatusCode.UNAUTHENTICATED:
            raise PenstockError(f"{failure}\npass the key with --api-key-file FILE or in ${KEY_VARIABLE}") from None
        if isinstance(failure, Unreachable) and failure.speaks_no_tls:
            raise PenstockError(f"{failure}; leave out --tls and the other TLS flags") from None
        if failure.code is grpc.StatusCode.UNIMPLEMENTED:
            raise PenstockError(
                "there is no penstock service at this address, or this is its admin listener; penstock serve prints "
                "both addresses"
            ) from None
        raise


def add_setting_flag(parser: argparse.ArgumentParser, explanation: str) -> None:
    """Adds ``--set NAME=VALUE``, which stores pairs in ``settings``."""
    parser.add_argument(
        "--set",
        action="append",
        type=reporting(setting),
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help=explanation,
    )


def default_target() -> str:
    """Returns the target from the environment, or else this machine's."""
    return os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET


def setting(text: str) -> tuple[str, object]:
    """Parses a request option from ``name=value``; None is its default. Raises InvalidOption."""
    name, value = name_and_value(text)
    start_from_line({"prompt": "-", name: value}, {})
    return name, value


def name_and_value(text: str) -> tuple[str, object]:
    """Parses ``name=value``, with the value as JSON or plain text; ``name=`` is None. Raises InvalidOption."""
    name, equals, written = (part.strip() for part in text.partition("="))
    if not (name and equals):
        raise InvalidOption(name or "name", "write it as name=value, such as temperature=0.7")
    try:
        return name, json.loads(written) if written else None
    except RecursionError:
        raise InvalidOption(name, "nested too deeply") from None
    except ValueError:
        return name, written


def _api_key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        return _read("--api-key-file", path).decode().strip()
    except UnicodeDecodeError:
        raise PenstockError(f"--api-key-file: {path} is not a text file; is it the right file?") from None


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PenstockError(f"{flag}: cannot read {path}: {error.strerror}") from None
