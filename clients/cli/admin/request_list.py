"""Formats live requests as lines of a table, and names their states."""

from penstock.v1 import admin_pb2 as pb

_PREFIX = "REQUEST_STATE_"
STATES = {name.removeprefix(_PREFIX).lower(): number for name, number in pb.RequestState.items() if number != 0}
"""The states of requests by the names that the commands use."""
_NAMES = {number: name for name, number in STATES.items()}

HEADER = f"{'request':26}  {'state':10}  {'age, s':>9}  {'prompt':>8}  {'output':>8}  {'at most':>8}  tenant"
"""The first line of the table. The lengths are in tokens."""


def request_line(request: pb.LiveRequest) -> str:
    """Formats one request. The output of several choices is their sum."""
    tokens = [f"{number:8,}" for number in (request.prompt_tokens, request.output_tokens)]
    choices = f" x {request.num_choices}" if request.num_choices > 1 else ""
    own_id = f"  {request.client_request_id}" if request.client_request_id else ""
    return "  ".join(
        (
            f"{request.request_id:26}",
            f"{_NAMES.get(request.state, '?'):10}",
            f"{request.age_ms / 1000:9,.1f}",
            *tokens,
            f"{f'{request.max_tokens:,}{choices}':>8}",
            f"{request.tenant}{own_id}",
        )
    )
