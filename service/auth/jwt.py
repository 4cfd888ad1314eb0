"""JSON web tokens (RFC 7519) as credentials: signed by a key of a JWKS file, for this service, for now, for a tenant.

A key has one algorithm, whatever a token's header says, and that algorithm has two sides: with the file alone nobody
makes a token. What is wrong with a token is told only to who has one with a good signature.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from penstock.service.auth.identity import ACT_FOR_OTHERS, ADMIN, Principal
from penstock.service.auth.reloaded_files import FileError, NamedFile
from penstock.service.config.limits import TENANT_NAME
from penstock.service.errors import Reason, ServiceError

JWKS_FLAG = "--jwt-jwks-file"
RIGHT_PREFIX = "penstock:"
"""Of a right, as the claim of rights has it: that claim may hold words for other services too."""
MAX_LEEWAY_S = 300.0
_MAX_TOKEN_BYTES = 8192
_MIN_RSA_BITS = 2048
_ALGORITHMS: Mapping[tuple[object, object], str] = {
    ("RSA", None): "RS256",
    ("EC", "P-256"): "ES256",
    ("OKP", "Ed25519"): "EdDSA",
}
"""By a key's type and curve."""
_PROBLEMS: Mapping[type[jwt.InvalidTokenError], str] = {
    jwt.ExpiredSignatureError: "the token has expired; get a new one",
    jwt.ImmatureSignatureError: "the token is not valid yet; try again, or set the clocks",
    jwt.InvalidAudienceError: "the token is not for this service; get one for its audience",
    jwt.InvalidIssuerError: "the token is of an issuer that is not trusted here",
    jwt.MissingRequiredClaimError: "the token lacks one of exp, iss and aud; get one that has them",
}


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token must say."""

    issuer: str
    """Its ``iss``."""
    audience: str
    """Its ``aud``, or one of them."""
    tenant_claim: str = "tenant"
    """Which claim names the tenant."""
    rights_claim: str = "scope"
    """Which claim has the rights: words with RIGHT_PREFIX, as a list or as text with spaces between."""
    leeway_s: float = 30.0
    """How far apart the issuer's clock and ours may be."""


class TokenKeys:
    """The keys of a JWKS file, and the rules that hold for their tokens."""

    def __init__(self, keys: Mapping[str, jwt.PyJWK], rules: TokenRules) -> None:
        """``keys`` by their ids."""
        self._keys = keys
        self._rules = rules

    @classmethod
    def parse(cls, file: NamedFile, content: bytes, rules: TokenRules) -> "TokenKeys":
        """Reads what a JWKS file (RFC 7517) holds; keys that sign no tokens are passed over. Raises FileError."""
        try:
            entries = json.loads(file.text(content))["keys"]
            entries = [dict(entry) for entry in entries]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise FileError(f'{file}: is no JWKS; it must be JSON such as {{"keys": [...]}}') from None
        keys: dict[str, jwt.PyJWK] = {}
        for number, entry in enumerate(entries):
            where = f"{file}: keys[{number}]"
            if not _signs(entry, where):
                continue
            kid = entry.get("kid")
            if not isinstance(kid, str) or not kid:
                raise FileError(f"{where}: has no kid; tokens name their key by it, so give it one")
            if kid in keys:
                raise FileError(f"{where}: another key has the kid {kid!r} too; remove one of them")
            keys[kid] = _key(entry, where)
        if not keys:
            raise FileError(f"{file}: holds no key that signs tokens; RS256, ES256 and EdDSA (Ed25519) do")
        return cls(keys, rules)

    def principal_of(self, credential: str) -> Principal | None:
        """See ``Credentials``."""
        if credential.count(".") != 2 or len(credential) > _MAX_TOKEN_BYTES:
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
            # The library looks at the claims of a token only once its signature is good.
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


def _signs(entry: Mapping[str, Any], where: str) -> bool:
    """Whether a key is one that signs tokens in a way that is taken here. Raises FileError for a secret."""
    if entry.get("kty") == "oct" or "d" in entry:
        raise FileError(f"{where}: holds a secret; a JWKS file has public keys alone, so remove it and make a new key")
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
    """Raises FileError."""
    try:
        key = jwt.PyJWK(entry, _algorithm(entry))
    except (jwt.PyJWTError, TypeError, ValueError):
        raise FileError(f"{where}: is no valid key; export it anew") from None
    if entry["kty"] == "RSA" and key.key.key_size < _MIN_RSA_BITS:
        raise FileError(f"{where}: is an RSA key of {key.key.key_size:,} bits; use {_MIN_RSA_BITS:,} or more")
    return key
