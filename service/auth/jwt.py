"""JSON web tokens (RFC 7519) as credentials. A token must be signed by a key of a JWKS, and be valid now, for this
service and for a tenant.

A key has one algorithm, whatever a token's header contains, and that algorithm is asymmetric: the JWKS is not
enough to make a token. Errors give the reason only if the token's signature is valid.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from penstock.clients.host.reloaded_files import FileError
from penstock.service.auth.identity import ACT_FOR_OTHERS, ADMIN, Principal
from penstock.service.config.limits import TENANT_NAME
from penstock.service.errors import Reason, ServiceError

JWKS_FLAG = "--jwt-jwks-file"
RIGHT_PREFIX = "penstock:"
"""Prefix of a right in the rights claim, since that claim may contain words for other services too."""
_MAX_TOKEN_BYTES = 8192
_MIN_RSA_BITS = 2048
_ALGORITHMS: Mapping[tuple[object, object], str] = {
    ("RSA", None): "RS256",
    ("EC", "P-256"): "ES256",
    ("OKP", "Ed25519"): "EdDSA",
}
"""The algorithms by a key's type and curve."""
_PROBLEMS: Mapping[type[jwt.InvalidTokenError], str] = {
    jwt.ExpiredSignatureError: "the token has expired; get a new one",
    jwt.ImmatureSignatureError: "the token is not valid yet; try again, or set the clocks",
    jwt.InvalidAudienceError: "the token is not for this service; get one for its audience",
    jwt.InvalidIssuerError: "the token's issuer is not trusted here",
    jwt.MissingRequiredClaimError: "the token lacks one of exp, iss and aud; get one that has them",
}


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The claims that a token must have."""

    issuer: str
    """Required ``iss``."""
    audience: str
    """Required ``aud``, or one of its values."""
    tenant_claim: str = "tenant"
    """The claim with the tenant's name."""
    rights_claim: str = "scope"
    """The claim with the rights: words with RIGHT_PREFIX, as a list or as text separated by spaces."""
    leeway_s: float = 30.0
    """Allowed difference between the clocks of the issuer and the service."""


class TokenKeys:
    """The keys of a JWKS, and the rules for their tokens."""

    def __init__(self, keys: Mapping[str, jwt.PyJWK], rules: TokenRules) -> None:
        """``keys`` are by their ids."""
        self._keys = keys
        self._rules = rules

    @classmethod
    def parse(cls, source: str, content: bytes, rules: TokenRules) -> "TokenKeys":
        """Parses a JWKS (RFC 7517); keys that do not sign tokens are ignored. ``source`` is the start of error
        messages. Raises FileError."""
        try:
            entries = json.loads(content)["keys"]
            entries = [dict(entry) for entry in entries]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise FileError(f'{source}: is not a JWKS; it must be JSON such as {{"keys": [...]}}') from None
        keys: dict[str, jwt.PyJWK] = {}
        for number, entry in enumerate(entries):
            where = f"{source}: keys[{number}]"
            if not _signs(entry, where):
                continue
            kid = entry.get("kid")
            if not isinstance(kid, str) or not kid:
                raise FileError(f"{where}: has no kid; tokens name their key by it, so give it one")
            if kid in keys:
                raise FileError(f"{where}: another key has the kid {kid!r} too; remove one of them")
            keys[kid] = _key(entry, where)
        if not keys:
            raise FileError(f"{source}: holds no key that signs tokens; RS256, ES256 and EdDSA (Ed25519) do")
        return cls(keys, rules)

    def lacks_key_of(self, credential: str) -> bool:
        """Returns whether a credential is a token that names an unknown key. Its signature is not checked."""
        if not _is_token(credential):
            return False
        try:
            return jwt.get_unverified_header(credential).get("kid") not in self._keys
        except (jwt.InvalidTokenError, TypeError, ValueError, RecursionError):
            return False

    def principal_of(self, credential: str) -> Principal | None:
        """See ``Credentials``."""
        if not _is_token(credential):
            return None
        rules = self._rules
        try:
            key = self._keys[jwt.get_unverified_header(credential)["kid"]]
            claims = jwt.decode(
                credential,
                key,
                algorithms=[key.algorithm_name],
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=rules.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.InvalidTokenError as error:
            # The library checks a token's claims only after its signature.
            raise ServiceError(Reason.UNAUTHENTICATED, _PROBLEMS.get(type(error), "")) from None
        except (LookupError, TypeError, ValueError, RecursionError):
            raise ServiceError(Reason.UNAUTHENTICATED) from None
        return self._principal(claims)

    def _principal(self, claims: Mapping[str, Any]) -> Principal:
        tenant, rights = claims.get(self._rules.tenant_claim), claims.get(self._rules.rights_claim, "")
        if not isinstance(tenant, str) or not TENANT_NAME.fullmatch(tenant):
            raise ServiceError(
                Reason.UNAUTHENTICATED,
                "the token names no tenant, 1 to 64 characters of [A-Za-z0-9_.-]; its issuer must add that claim",
            )
        words = rights.split() if isinstance(rights, str) else rights if isinstance(rights, list) else []
        return Principal(tenant, RIGHT_PREFIX + ACT_FOR_OTHERS in words, RIGHT_PREFIX + ADMIN in words)


def _is_token(credential: str) -> bool:
    return credential.count(".") == 2 and len(credential) <= _MAX_TOKEN_BYTES


def _signs(entry: Mapping[str, Any], where: str) -> bool:
    """Returns whether a key signs tokens with a supported algorithm. Raises FileError for a secret."""
    if entry.get("kty") == "oct" or "d" in entry:
        raise FileError(f"{where}: holds a secret; a JWKS has only public keys, so remove it and make a new key")
    algorithm, operations = _algorithm(entry), entry.get("key_ops", ["verify"])
    return (
        algorithm is not None
        and entry.get("alg", algorithm) == algorithm
        and entry.get("use", "sig") == "sig"
        and isinstance(operations, list)
        and "verify" in operations
    )


def _algorithm(entry: Mapping[str, Any]) -> str | None:
    kind, curve = entry.get("kty"), entry.get("crv")
    return _ALGORITHMS.get((kind, curve)) if isinstance(kind, str) and isinstance(curve, str | None) else None


def _key(entry: dict[str, Any], where: str) -> jwt.PyJWK:
    """Parses one entry of a JWKS. Raises FileError."""
    try:
        key = jwt.PyJWK(entry, _algorithm(entry))
    except (jwt.PyJWTError, TypeError, ValueError):
        raise FileError(f"{where}: is not a valid key; export it again") from None
    if entry["kty"] == "RSA" and key.key.key_size < _MIN_RSA_BITS:
        raise FileError(f"{where}: is an RSA key of {key.key.key_size:,} bits; use {_MIN_RSA_BITS:,} or more")
    return key
