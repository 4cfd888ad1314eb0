"""Formats live requests as lines of a table, and names their states."""

import penstock.v1 as pb
from penstock.clients.cli.as_dict import seconds_of

_PREFIX = "REQUEST_STATE_"
STATES = {name.removeprefix(_PREFIX).lower(): number for name, number in pb.RequestState.items() if number != 0}
"""The states of requests by the names that the commands use."""
_NAMES = {number: name for name, number in STATES.items()}

HEADER = f"{'request':26}  {'state':10}  {'age, s':>9}  {'prompt':>8}  {'output':>8}  {'at most':>8}  tenant"
"""The first line of the table. The lengths are in tokens."""


def request_line(request: pb.LiveRequest) -> str:
    """Formats one request. The output of several choices is their sum."""
    at_most = f"{request.max_tokens:,}" + (f" x {request.num_choices}" if request.num_choices > 1 else "")
    own_id = f"  {request.client_request_id}" if request.client_request_id else ""
    return (
        f"{request.request_id:26}  {_NAMES.get(request.state, '?'):10}  {seconds_of(request.age):9,.1f}  "
        f"{request.prompt_tokens:8,}  {request.output_tokens:8,}  {at_most:>8}  {request.tenant}{own_id}"
    )
