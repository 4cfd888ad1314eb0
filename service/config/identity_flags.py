"""Checks that the flags for TLS, keys and tokens go together."""

import re
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
    for flag_name, port in (("--http-port", config.http_port), ("--admin-http-port", config.admin_http_port)):
        if config.tls_client_ca is not None and port is not None and not config.has_credentials:
            raise ConfigError(
                f"{flag_name}: --tls-client-ca does not apply to HTTP, where anyone could call; give --api-keys-file "
                f"or --jwt-jwks-file too, or leave {flag_name} out"
            )
    _check_tokens(config)


def _check_tokens(config: "ServeConfig") -> None:
    if config.jwt_jwks_file is not None and config.jwt_jwks_url is not None:
        raise ConfigError("--jwt-jwks-url: the keys come from --jwt-jwks-file already; leave one of them out")
    if config.jwt_jwks_url is not None and not re.match(r"https://[^/?#@\s]+(/\S*)?$", config.jwt_jwks_url):
        raise ConfigError(
            f"--jwt-jwks-url: must be a URL such as https://id.example/jwks.json; it is {config.jwt_jwks_url!r}"
        )
    source = "--jwt-jwks-url" if config.jwt_jwks_file is None else "--jwt-jwks-file"
    has_keys = config.jwt_jwks_file is not None or config.jwt_jwks_url is not None
    if has_keys and not (config.jwt_issuer and config.jwt_audience):
        missing = [name for name in ("issuer", "audience") if not getattr(config, f"jwt_{name}")]
        raise ConfigError(f"{source}: needs {' and '.join(f'--jwt-{name}' for name in missing)} as well")
    if not has_keys and (config.jwt_issuer or config.jwt_audience):
        given = "--jwt-issuer" if config.jwt_issuer else "--jwt-audience"
        raise ConfigError(f"{given}: needs --jwt-jwks-file or --jwt-jwks-url as well, with the keys that sign tokens")
