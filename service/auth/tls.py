"""TLS of a listener: its certificate and key, and the certificates that must have signed its callers' certificates.

The files may change while the service runs: open connections stay as they are, and new ones use the new files. Files
are checked here before gRPC gets them, since gRPC's own errors give little detail.
"""

import datetime
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from penstock.clients.host.reloaded_files import FileError, NamedFile, TooEarly, WatchedFiles

CERT_FLAG, KEY_FLAG, CLIENT_CA_FLAG = "--tls-cert", "--tls-key", "--tls-client-ca"
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)

_log = logging.getLogger(__name__)

_Configuration: TypeAlias = "grpc.ServerCertificateConfiguration"


class ServerTls:
    """The certificate of a service's listeners, and the certificates that they require of callers."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        """Paths of PEM files: the chain, with the service's own certificate first; its private key; and, for mutual
        TLS, the certificates that must have signed those of callers. Raises FileError."""
        self._certificate, self._key = NamedFile(CERT_FLAG, certificate), NamedFile(KEY_FLAG, key)
        self._client_ca = None if client_ca is None else NamedFile(CLIENT_CA_FLAG, client_ca)
        files = [self._certificate, self._key, *([] if self._client_ca is None else [self._client_ca])]
        self.files: WatchedFiles[_Configuration] = WatchedFiles(files, self._load)

    @property
    def is_mutual(self) -> bool:
        """Whether callers need a certificate too."""
        return self._client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """Returns the credentials for one listener."""
        current = self.files.value

        def news() -> "_Configuration | None":
            # Called by gRPC at each new connection, in a thread of its own.
            nonlocal current
            now = self.files.value
            if now is current:
                return None
            current = now
            return now

        # The stub lacks None, which means no change.
        return grpc.dynamic_ssl_server_credentials(current, news, self.is_mutual)  # type: ignore[arg-type]

    def _load(self, chain: bytes, key: bytes, client_ca: bytes | None = None) -> _Configuration:
        """Checks the files, and returns gRPC's configuration. Raises FileError."""
        certificate = _certificates(self._certificate, chain)[0]
        _check_pair(self._certificate, certificate, self._key, key)
        _check_time(self._certificate, certificate)
        if client_ca is not None:
            assert self._client_ca is not None
            _certificates(self._client_ca, client_ca)
        _log.info("%s: valid until %s", self._certificate, _date(certificate.not_valid_after_utc))
        return grpc.ssl_server_certificate_configuration([(key, chain)], client_ca)


def _certificates(file: NamedFile, content: bytes) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise FileError(f"{file}: holds no certificate in PEM, or a broken one; check the file") from None


def _check_pair(named: NamedFile, certificate: x509.Certificate, key_file: NamedFile, content: bytes) -> None:
    """Raises FileError if the key is invalid, or is not the certificate's. The error contains nothing of the key."""
    try:
        key = load_pem_private_key(content, None)
    except TypeError:
        remedy = "give it without a passphrase, readable only by this user"
        raise FileError(f"{key_file}: is encrypted; {remedy}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise FileError(f"{key_file}: holds no private key in PEM, or a broken one; check the file") from None
    public = key.public_key()
    is_known_curve = isinstance(public, ec.EllipticCurvePublicKey) and isinstance(public.curve, _CURVES)
    if not (is_known_curve or isinstance(public, rsa.RSAPublicKey)):
        raise FileError(f"{key_file}: has a type that TLS clients do not accept; use RSA, or EC with P-256 or P-384")
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if public.public_bytes(*form) != certificate.public_key().public_bytes(*form):
        problem = f"is not the key of the first certificate in {named}"
        raise FileError(f"{key_file}: {problem}; give the two that belong together")


def _check_time(file: NamedFile, certificate: x509.Certificate) -> None:
    """Raises FileError if the certificate is not valid now."""
    now = datetime.datetime.now(datetime.UTC)
    if now < certificate.not_valid_before_utc:
        begin = _date(certificate.not_valid_before_utc)
        raise TooEarly(f"{file}: is not valid before {begin}; give one that is valid now, or set the clock")
    if now > certificate.not_valid_after_utc:
        raise FileError(f"{file}: expired on {_date(certificate.not_valid_after_utc)}; get a new one")


def _date(when: datetime.datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"
