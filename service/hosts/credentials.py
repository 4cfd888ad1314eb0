"""What the hosts show each other when they join: a token, certificates, or both."""

import logging
import os
import secrets
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clients.host.loopback import resolves_to_loopback
from penstock.clients.host.reloaded_files import FileError, NamedFile
from penstock.models.executor.join.token import MIN_TOKEN_BYTES
from penstock.service.config.addresses import ListenError

if TYPE_CHECKING:
    from penstock.service.config.host_flags import HostFlags

MAX_TOKEN_BYTES = 4096
MAKE_TOKEN = "make one with: openssl rand -hex 32"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinCredentials:
    """The token and the TLS of one side; None where there is none."""

    token: bytes | None
    tls: ssl.SSLContext | None

    @classmethod
    def load(cls, config: "HostFlags") -> "JoinCredentials":
        """Reads those of a host of ``penstock serve``. A leader that other machines can reach must have some. Raises
        FileError and ListenError."""
        found = cls.read(
            config.join_token_file, config.join_tls_ca, config.join_tls_cert, config.join_tls_key,
            is_leader=config.node_rank == 0,
        )  # fmt: skip
        is_open = found.token is None and found.tls is None
        if is_open and config.distributed_executor_backend == "ray":
            return cls(secrets.token_hex(MIN_TOKEN_BYTES).encode(), None)  # which only this service's workers get
        if config.node_rank == 0 and is_open and not resolves_to_loopback(config.master_addr):
            raise ListenError(
                f"--master-addr {config.master_addr}: anyone who can reach this address could join and read all "
                f"prompts; give --join-token-file or --join-tls-ca, -cert and -key, or listen on 127.0.0.1"
            )
        return found

    @classmethod
    def read(
        cls, token: Path | None, ca: Path | None, cert: Path | None, key: Path | None, *, is_leader: bool
    ) -> "JoinCredentials":
        """Reads files; all of those for TLS are given, or none. Raises FileError."""
        tls = None
        if ca is not None and cert is not None and key is not None:
            tls = _new_context(ca, cert, key, is_leader=is_leader)
        return cls(None if token is None else _read_token(token), tls)


def _read_token(path: Path) -> bytes:
    """Returns the content of a token's file without the white space around it. Warns if other users may read it."""
    file = NamedFile("--join-token-file", path)
    token = file.read().strip()
    if len(token) < MIN_TOKEN_BYTES:
        raise FileError(f"{file}: must have at least {MIN_TOKEN_BYTES} bytes, and has {len(token)}; {MAKE_TOKEN}")
    if len(token) > MAX_TOKEN_BYTES:
        raise FileError(f"{file}: has more than {MAX_TOKEN_BYTES} bytes; is it the right file?")
    if _is_readable_by_others(path):
        _log.warning("%s: other users of this machine may read it; run: chmod 600 %s", file, path)
    return token


def _is_readable_by_others(path: Path) -> bool:
    found = path.stat()
    # A pod reads the files of its Secrets as a member of their group, of which it may be the only one.
    is_for_group = found.st_mode & stat.S_IRWXG and found.st_gid != os.getegid()
    return bool(found.st_mode & stat.S_IRWXO or is_for_group)


def _new_context(ca: Path, cert: Path, key: Path, *, is_leader: bool) -> ssl.SSLContext:
    """Returns a context in which both sides need a certificate of the CA, and the leader's must have its name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_leader else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    loads: tuple[tuple[NamedFile, Callable[[], None]], ...] = (
        (NamedFile("--join-tls-ca", ca), lambda: context.load_verify_locations(ca)),
        (NamedFile("--join-tls-cert", cert), lambda: context.load_cert_chain(cert, key, password="")),
    )
    for file, load in loads:
        file.read()
        try:
            load()
        except (ssl.SSLError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error)
            with_key = f" with --join-tls-key {key}" if file.path == cert else ""
            raise FileError(f"{file}{with_key}: cannot be used ({str(reason).lower().replace('_', ' ')})") from error
        except OSError as error:
            raise FileError(f"--join-tls-key {key}: cannot be read ({error.strerror}); check the path") from error
    return context
