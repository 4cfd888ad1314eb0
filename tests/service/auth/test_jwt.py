"""Tokens: whose key signed them, for whom, for when, and what they may."""

import base64
import hashlib
import hmac
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.clients.host.reloaded_files import FileError
from penstock.service.auth.identity import Principal
from penstock.service.auth.jwt import TokenKeys, TokenRules
from penstock.service.errors import Reason, ServiceError

RULES = TokenRules("https://id.example", "penstock", leeway_s=10)
FILE = "--jwt-jwks-file jwks.json"


def base64url(content):
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def encoded(value):
    return base64url(json.dumps(value).encode())


def parse(jwks, rules=RULES):
    return TokenKeys.parse(FILE, json.dumps(jwks).encode(), rules)


@pytest.fixture
def keys(issuer):
    return parse(issuer.jwks())


def refusal(keys, token):
    with pytest.raises(ServiceError) as error:
        keys.principal_of(token)
    assert error.value.reason is Reason.UNAUTHENTICATED
    return error.value.message


@pytest.mark.parametrize("kid", ["rsa", "ec", "ed"])
def test_each_kind_of_key_signs(issuer, keys, kid):
    assert keys.principal_of(issuer.token(kid)) == Principal("acme")


@pytest.mark.parametrize(
    ("scope", "principal"),
    [
        ("", Principal("acme")),
        ("openid admin act-for-others", Principal("acme")),
        ("openid penstock:admin", Principal("acme", may_administer=True)),
        (["penstock:act-for-others"], Principal("acme", may_act_for_others=True)),
        ("penstock:admin penstock:act-for-others", Principal("acme", may_act_for_others=True, may_administer=True)),
        ({"penstock:admin": 1}, Principal("acme")),
        (None, Principal("acme")),
    ],
)
def test_rights_are_words_of_a_claim(issuer, keys, scope, principal):
    assert keys.principal_of(issuer.token(scope=scope)) == principal


def test_claims_may_have_other_names(issuer):
    rules = TokenRules(RULES.issuer, RULES.audience, "https://id.example/team", "roles")
    token = issuer.token(**{"https://id.example/team": "zenith", "roles": ["penstock:admin"]})
    assert parse(issuer.jwks(), rules).principal_of(token) == Principal("zenith", may_administer=True)


def test_clocks_may_differ_a_little(issuer, keys):
    now = time.time()
    assert keys.principal_of(issuer.token(exp=now - 5)) is not None
    assert keys.principal_of(issuer.token(nbf=now + 5)) is not None


@pytest.mark.parametrize(
    ("claims", "told"),
    [
        ({"exp": time.time() - 60}, "the token has expired"),
        ({"nbf": time.time() + 86_400}, "not valid yet"),
        ({"iat": time.time() + 86_400}, "not valid yet"),
        ({"aud": "another"}, "not for this service"),
        ({"aud": ["another", "third"]}, "not for this service"),
        ({"iss": "https://evil.example"}, "issuer is not trusted"),
        ({"exp": None}, "lacks one of exp, iss and aud"),
        ({"aud": None}, "lacks one of exp, iss and aud"),
        ({"iss": None}, "lacks one of exp, iss and aud"),
        ({"tenant": None}, "names no tenant"),
        ({"tenant": "a/b"}, "names no tenant"),
        ({"tenant": 7}, "names no tenant"),
        ({"tenant": ["acme"]}, "names no tenant"),
    ],
)
def test_a_token_with_inapplicable_claims_is_refused_with_the_reason(issuer, keys, claims, told):
    assert told in refusal(keys, issuer.token(**claims))


def test_several_audiences_are_enough_where_ours_is_among_them(issuer, keys):
    assert keys.principal_of(issuer.token(aud=["another", "penstock"])) is not None


def test_a_token_that_fails_verification_gets_no_details(issuer, other_issuer, keys):
    plain = refusal(keys, "e30.e30.e30")
    assert plain.startswith("no valid API key or token")
    header, claims, signature = issuer.token(exp=time.time() - 60).split(".")
    for token in (
        other_issuer.token(),  # the same kids, other keys
        other_issuer.token(exp=1),
        f"{header}.{claims}.{signature[:-4]}AAAA",
        f"{header}.{issuer.token().split('.')[1]}.{signature}",
        issuer.token(headers={"kid": "unknown"}),
        f"{encoded({'alg': 'RS256', 'kid': ['rsa']})}.{claims}.{signature}",
        f"{encoded({'alg': 'RS256'})}.{claims}.{signature}",
        f"{encoded(['rsa'])}.{claims}.{signature}",
        issuer.token(headers={"crit": ["x"], "x": 1}),
        f"{header}.{claims}.",
        "..",
        "\x00.é.ü",
        "[" * 3000 + "..",
        base64url(b'{"kid":"rsa","alg":"RS256","x":' + b"[" * 3000) + ".e30.AAAA",
        jwt.encode(issuer.claims(), "", algorithm="none", headers={"kid": "rsa"}),
    ):
        assert refusal(keys, token) == plain, token


@pytest.mark.parametrize(("kid", "algorithm"), [("rsa", "RS512"), ("rsa", "PS256")])
def test_a_token_cannot_choose_its_keys_algorithm(issuer, keys, kid, algorithm):
    token = jwt.encode(issuer.claims(), issuer.private[kid], algorithm=algorithm, headers={"kid": kid})
    assert refusal(keys, token).startswith("no valid API key")


def test_a_public_key_is_no_secret_to_sign_with(issuer, keys):
    """The oldest trick: HMAC with the public key's text."""
    [public, *_] = issuer.jwks()["keys"]
    pem = issuer.private["rsa"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for secret in (pem, json.dumps(public).encode(), b""):
        signed = f"{encoded({'alg': 'HS256', 'kid': 'rsa'})}.{encoded(issuer.claims())}"
        token = f"{signed}.{base64url(hmac.digest(secret, signed.encode(), hashlib.sha256))}"
        assert refusal(keys, token).startswith("no valid API key")


def test_what_is_no_token_is_left_to_others(keys):
    for credential in ("k" * 40, "a.b", "a.b.c.d", "x." * 2 + "y" * 10_000):
        assert keys.principal_of(credential) is None


def test_keys_that_sign_nothing_here_are_passed_over(issuer):
    jwks = issuer.jwks()
    ours = jwks["keys"][0]
    others = [
        {**ours, "kid": "encrypts", "use": "enc"},
        {**ours, "kid": "other", "alg": "RS512"},
        {**ours, "kid": "signs", "key_ops": ["sign"]},
        {**ours, "kid": "nothing", "key_ops": None},
        {**ours, "kid": "number", "key_ops": 2},
        {"kty": "EC", "crv": "P-521", "kid": "curve", "x": "AA", "y": "AA"},
        {"kty": "new", "kid": "new"},
    ]
    keys = parse({"keys": [*others, ours]})
    assert keys.principal_of(issuer.token("rsa")) == Principal("acme")
    assert refusal(keys, issuer.token("rsa", headers={"kid": "other"})).startswith("no valid API key")
    with pytest.raises(FileError, match="holds no key that signs tokens"):
        parse({"keys": others})


def test_a_bad_file_is_named_and_shows_no_secret(issuer):
    ours = issuer.jwks()["keys"][0]
    private = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(issuer.private["rsa"]))
    weak = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key()))
    for jwks, problem in (
        ([], "is not a JWKS"),
        ({}, "is not a JWKS"),
        ({"keys": [3]}, "is not a JWKS"),
        ({"keys": []}, "holds no key that signs tokens"),
        ({"keys": [ours, ours]}, "keys[1]: another key has the kid 'rsa' too"),
        ({"keys": [{**ours, "kid": ""}]}, "keys[0]: has no kid"),
        ({"keys": [{name: ours[name] for name in ours if name != "kid"}]}, "keys[0]: has no kid"),
        ({"keys": [{**ours, "n": "!"}]}, "keys[0]: is not a valid key"),
        ({"keys": [{**ours, "n": 5}]}, "keys[0]: is not a valid key"),
        ({"keys": [{**weak, "kid": "weak"}]}, "keys[0]: is an RSA key of 1,024 bits; use 2,048 or more"),
        ({"keys": [private]}, "keys[0]: holds a secret"),
        ({"keys": [{"kty": "oct", "k": "hush", "kid": "x"}]}, "keys[0]: holds a secret"),
    ):
        with pytest.raises(FileError) as error:
            parse(jwks)
        assert str(error.value).startswith("--jwt-jwks-file jwks.json: "), problem
        assert problem in str(error.value)
        assert "hush" not in str(error.value)
        assert private["d"] not in str(error.value)
    with pytest.raises(FileError, match="is not a JWKS"):
        TokenKeys.parse(FILE, b"{", RULES)


def test_an_ec_key_of_another_curve_signs_nothing_here(issuer):
    key = ec.generate_private_key(ec.SECP384R1())
    jwk = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key()))
    keys = parse({"keys": [{**jwk, "kid": "p384"}, *issuer.jwks()["keys"]]})
    token = jwt.encode(issuer.claims(), key, algorithm="ES384", headers={"kid": "p384"})
    assert refusal(keys, token).startswith("no valid API key")
