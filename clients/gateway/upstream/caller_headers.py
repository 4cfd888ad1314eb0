"""Reads a caller's headers: its API key, its tenant, its idempotency key, and what the gateways in front of this one
say about the request. Each may occur only once, because a proxy may have added its own to the caller's."""

from collections.abc import Mapping

from google.protobuf.message import Message
from starlette.datastructures import Headers

from penstock.clients.gateway.errors import GatewayError, invalid
from penstock.clients.gateway.field_names import IDEMPOTENCY_KEY
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.host.routing_headers import TENANT_NAME, RoutingHeaderError, RoutingHeaders

_MAX_KEY_BYTES = 8192
"""The service takes keys of 1,024 bytes and tokens of at most 8,192."""
_MAX_IDEMPOTENCY_KEY_BYTES = 128
"""The contract's limit."""


def bearer_key(headers: Headers) -> str | None:
    """Returns the key from the header Authorization, or from X-API-Key, which Anthropic's clients send; None if there
    is none. Raises GatewayError."""
    given = headers.getlist("authorization")
    if len(given) > 1:
        message = f"send the header Authorization once; there are {len(given)}"
        raise GatewayError(401, message, code="invalid_api_key")
    scheme, _, key = given[0].partition(" ") if given else ("", "", "")
    shown = [key if scheme.lower() == "bearer" else "", *headers.getlist("x-api-key")]
    keys = {key.strip() for key in shown} - {""}
    if len(keys) > 1:
        message = "send the API key once, in the header Authorization or X-API-Key; there are several"
        raise GatewayError(401, message, code="invalid_api_key")
    if not keys:
        return None
    key = keys.pop()
    if not (key.isascii() and key.isprintable() and len(key) <= _MAX_KEY_BYTES):
        message = f"the API key must be printable ASCII, at most {_MAX_KEY_BYTES:,} bytes"
        raise GatewayError(401, message, code="invalid_api_key")
    return key


def named_tenant(headers: Headers, settings: GatewaySettings) -> str:
    """Returns the tenant that a request names; empty if it names none. Raises GatewayError."""
    header = settings.tenant_header
    named = headers.getlist(header) if header else []
    if len(named) > 1:
        raise GatewayError(400, f"send the header {header} only once", code="invalid_tenant")
    tenant = named[0] if named else ""
    if not tenant and settings.requires_tenant:
        raise GatewayError(400, f"the header {header} is missing; name the tenant in it", code="invalid_tenant")
    if tenant and not TENANT_NAME.fullmatch(tenant):
        message = f"the header {header} must have 1 to 64 characters of [A-Za-z0-9_.-]"
        raise GatewayError(400, message, code="invalid_tenant")
    return tenant


def idempotency_key(headers: Headers) -> str:
    """Returns the caller's key for a request and its repetitions; empty if there is none. Raises GatewayError."""
    given = headers.getlist(IDEMPOTENCY_KEY)
    if not given:
        return ""
    key = given[0]
    if len(given) > 1:
        raise invalid(IDEMPOTENCY_KEY, f"send this header only once; there are {len(given)}")
    if not (key and key.isascii() and key.isprintable() and len(key) <= _MAX_IDEMPOTENCY_KEY_BYTES):
        problem = f"must have 1 to {_MAX_IDEMPOTENCY_KEY_BYTES} characters of printable ASCII"
        raise invalid(IDEMPOTENCY_KEY, problem)
    return key


def fairness_tenant(headers: Headers) -> str:
    """Returns the tenant that a gateway names for fairness, if the key may act for others; empty if it names none.
    Raises GatewayError."""
    try:
        return RoutingHeaders.read(headers.items()).tenant
    except RoutingHeaderError as error:
        raise _refused(error) from None


def fill_routing(message: Message, headers: Mapping[str, str], settings: GatewaySettings) -> None:
    """Sets the priority, targets and ids from headers, in fields that are not set. Raises GatewayError."""
    try:
        RoutingHeaders.read(headers.items()).fill(message, settings.objectives, may_act_for_others=False)
    except RoutingHeaderError as error:
        raise _refused(error) from None


def _refused(error: RoutingHeaderError) -> GatewayError:
    return GatewayError(400, str(error), param=error.header, code="invalid_header")
