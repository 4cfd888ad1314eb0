"""Checks that the flags for TLS, keys and tokens go together."""

from typing import TYPE_CHECKING

from penstock.service.config.flags import ConfigError

if TYPE_CHECKING:
    from penstock.service.config.serve_config import ServeConfig


def check_identity(config: "ServeConfig") -> None:
    """Raises ConfigError for flags for TLS and tokens that exclude or need each other."""
    if (config.tls_cert is None) != (config.tls_key is None):
        flag_name, other = ("--tls-key", "--tls-cert") if config.tls_cert is None else ("--tls-cert", "--tls-key")
        raise ConfigError(f"{flag_name}: needs {other} as well: set both or neither")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("--tls-client-ca: needs --tls-cert and --tls-key as well")
    if config.tls_cert is not None and config.address.startswith("unix:"):
        raise ConfigError(
            "--tls-cert: a Unix socket has no TLS; leave --tls-cert and --tls-key out, or listen on HOST:PORT"
        )
    if config.tls_client_ca is not None and config.http_port is not None and not config.has_credentials:
        raise ConfigError(
            "--http-port: --tls-client-ca does not apply to HTTP, where anyone could call; give --api-keys-file or "
            "--jwt-jwks-file too, or leave --http-port out"
        )
    if config.jwt_jwks_file is not None and not (config.jwt_issuer and config.jwt_audience):
        missing = [name for name in ("issuer", "audience") if not getattr(config, f"jwt_{name}")]
        raise ConfigError(f"--jwt-jwks-file: needs {' and '.join(f'--jwt-{name}' for name in missing)} as well")
    if config.jwt_jwks_file is None and (config.jwt_issuer or config.jwt_audience):
        given = "--jwt-issuer" if config.jwt_issuer else "--jwt-audience"
        raise ConfigError(f"{given}: needs --jwt-jwks-file as well, with the keys that sign tokens")
