"""Tickets over HTTP: what continues a stream that broke off, at this gateway or another one."""

import base64
import re

import penstock.v1 as pb
from penstock.clients.gateway.errors import invalid
from penstock.clients.gateway.schemas.common import GenerationBody, ResumeFrom

TICKET_HEADER = "x-penstock-resume-ticket"
_TICKET = re.compile(r"[A-Za-z0-9_-]+={0,2}")


def shown_ticket(ticket: bytes) -> str:
    """Returns a ticket in base64url without padding, the format of the header."""
    return base64.urlsafe_b64encode(ticket).rstrip(b"=").decode()


def fill_resumption(start: pb.GenerationStart, body: GenerationBody) -> None:
    """Fills ``resume_from``. Raises GatewayError."""
    resumed = body.resume_from
    if resumed is None:
        return
    start.resume_from.ticket = _read_ticket(resumed.ticket)
    for choice in resumed.choices:
        start.resume_from.choices.add(**choice.model_dump(exclude_none=True))


def check_resumed_echo(resumed: ResumeFrom | None, echo: bool | None) -> None:
    """Raises GatewayError for a request that would echo again what its caller has."""
    if resumed is not None and echo:
        raise invalid("echo", "not with resume_from: omit it, and count only the characters of the output")


def _read_ticket(text: str) -> bytes:
    digits = text.rstrip("=")
    if not _TICKET.fullmatch(text) or len(digits) % 4 == 1:
        problem = f"is not base64url; send the header {TICKET_HEADER} of the broken stream unchanged"
        raise invalid("resume_from.ticket", problem, code="ticket_invalid")
    return base64.urlsafe_b64decode(digits + "=" * (-len(digits) % 4))
