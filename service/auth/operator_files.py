"""Loads the operator's files from their flags: API keys, token keys, certificates and tenants' limits."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.clients.host.reloaded_files import NamedFile, Watched, WatchedFiles
from penstock.service.auth.identity import (
    API_KEYS_FLAG,
    AllowAll,
    ApiKeys,
    Authenticator,
    BearerAuthenticator,
    Credentials,
)
from penstock.service.auth.jwks_url import JwksUrl
from penstock.service.auth.jwt import JWKS_FLAG, TokenKeys, TokenRules
from penstock.service.auth.tenant_limits import TENANTS_FLAG, TenantLimitsFile, parse_tenants
from penstock.service.auth.tls import ServerTls
from penstock.service.config.serve_config import ServeConfig


@dataclass(frozen=True, slots=True)
class OperatorFiles:
    """The operator's files. Each is read again when it changes."""

    authenticator: Authenticator
    tls: ServerTls | None
    tenants: WatchedFiles[TenantLimitsFile] | None
    watched: tuple[Watched, ...]
    """All files."""

    @classmethod
    def load(cls, config: ServeConfig) -> "OperatorFiles":
        """Reads the files. Raises FileError."""
        watched: list[Watched] = []
        kinds: list[Callable[[], Credentials]] = []
        if config.api_keys_file is not None:
            keys_file = NamedFile(API_KEYS_FLAG, config.api_keys_file)
            keys = WatchedFiles([keys_file], lambda content: ApiKeys.parse(keys_file, content))
            watched.append(keys)
            kinds.append(lambda: keys.value)
        if config.jwt_jwks_file is not None:
            jwks_file, rules = NamedFile(JWKS_FLAG, config.jwt_jwks_file), _token_rules(config)
            tokens = WatchedFiles([jwks_file], lambda content: TokenKeys.parse(str(jwks_file), content, rules))
            watched.append(tokens)
            kinds.append(lambda: tokens.value)
        if config.jwt_jwks_url is not None:
            provider = JwksUrl(config.jwt_jwks_url, _token_rules(config))
            watched.append(provider)
            kinds.append(lambda: provider)
        tls = None
        if config.tls_cert is not None and config.tls_key is not None:
            tls = ServerTls(config.tls_cert, config.tls_key, config.tls_client_ca)
            watched.append(tls.files)
        tenants = None
        if config.tenants_file is not None:
            file = NamedFile(TENANTS_FLAG, config.tenants_file)
            tenants = WatchedFiles([file], lambda content: parse_tenants(file, content))
            watched.append(tenants)
        return cls(BearerAuthenticator(kinds) if kinds else AllowAll(), tls, tenants, tuple(watched))


def _token_rules(config: ServeConfig) -> TokenRules:
    assert config.jwt_issuer is not None, "the configuration is checked"
    assert config.jwt_audience is not None, "the configuration is checked"
    return TokenRules(
        config.jwt_issuer, config.jwt_audience, config.jwt_tenant_claim, config.jwt_rights_claim, config.jwt_leeway
    )
