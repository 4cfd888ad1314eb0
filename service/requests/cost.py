"""The limits on what a request may cost in total, whatever its single fields allow."""

import penstock.v1 as pb
from penstock.service.errors import Reason, ServiceError
from penstock.service.streaming.pending_message import ENTRY_BYTES, MAX_TOKEN_BYTES, OutputForm

MAX_TOKENS_IN_ALL = 1 << 20
"""The maximum total of prompt and output tokens of a request's choices, if it has several. A step's bookkeeping on the
event loop grows with it."""
MAX_LOGPROB_ENTRIES = 1 << 22
"""The maximum number of log-probabilities of a request's output, and of its prompt."""
MAX_WHOLE_ANSWER = 512_000
"""The maximum size of a response in one message, in units of 8 bytes. It stays below the 4 MiB default limit of gRPC's
clients, and leaves 96 KB for the other fields of 64 choices. A log-probability without its token's text takes at most
one unit."""
_ID_BYTES = 3
"""The maximum size of an id below 2**21, and the usual overhead of a text besides its bytes."""


def check_cost(
    n: int, logprobs: int | None, prompt_logprobs: int | None, num_prompt_tokens: int, max_tokens: int
) -> None:
    """Checks a request's total cost, before anything is allocated for it. Raises ServiceError."""
    num_tokens = n * (num_prompt_tokens + max_tokens)
    # For a single choice the model's context is the only limit.
    if n > 1 and num_tokens > MAX_TOKENS_IN_ALL:
        raise too_expensive("sampling.n", "n x (prompt tokens + max_tokens)", num_tokens, MAX_TOKENS_IN_ALL)
    if logprobs is not None and (entries := n * max_tokens * (logprobs + 1)) > MAX_LOGPROB_ENTRIES:
        raise too_expensive("output.logprobs", "n x max_tokens x (logprobs + 1)", entries, MAX_LOGPROB_ENTRIES)
    if prompt_logprobs is not None:
        entries = num_prompt_tokens * (prompt_logprobs + 1)
        if entries > MAX_LOGPROB_ENTRIES:
            formula = "prompt tokens x (prompt_logprobs + 1)"
            raise too_expensive("output.prompt_logprobs", formula, entries, MAX_LOGPROB_ENTRIES)


def check_token_texts(output: pb.OutputOptions, longest_bytes: int) -> None:
    """Checks that a token's log-probabilities fit in one message together with their tokens' texts, each of at most
    ``longest_bytes``. Raises ServiceError."""
    if not output.include_token_texts:
        return
    for name in ("logprobs", "prompt_logprobs"):
        num_bytes = (getattr(output, name) + 1) * (longest_bytes + ENTRY_BYTES)
        if output.HasField(name) and num_bytes > MAX_TOKEN_BYTES:
            formula = f"({name} + 1) x {longest_bytes + ENTRY_BYTES:,}"
            remedy = "reduce it, or omit include_token_texts"
            raise too_expensive(f"output.{name}", formula, num_bytes, MAX_TOKEN_BYTES, remedy)


def fit_whole(
    start: pb.GenerationStart, form: OutputForm, longest_bytes: int, num_prompt_tokens: int, max_tokens: int
) -> int:
    """Returns ``max_tokens``, reduced to fit in one message if the caller did not set it. ``longest_bytes`` is the size
    of the longest text of a token. Raises ServiceError if the caller's own ``max_tokens`` does not fit."""
    n, output = start.sampling.n or 1, start.output
    units = _units(form.text * longest_bytes + form.token_ids * _ID_BYTES)
    per_entry = 1 if form.token_text is None else 1 + _units(longest_bytes + _ID_BYTES)
    times = "" if per_entry == 1 else f" x {per_entry}"
    field, formula, units_per_token = "sampling.max_tokens", f"n x max_tokens x {units}", units
    if output.HasField("logprobs"):
        field, formula = "output.logprobs", f"n x max_tokens x (logprobs + {units + 1})"
        if times:
            formula = f"n x max_tokens x ((logprobs + 1){times} + {units})"
        units_per_token += (output.logprobs + 1) * per_entry
    prompt_units = 0
    if output.HasField("prompt_logprobs"):
        formula += f" + prompt tokens x (prompt_logprobs + 1){times}"
        prompt_units = num_prompt_tokens * (output.prompt_logprobs + 1) * per_entry
    if not start.sampling.HasField("max_tokens"):
        room = (MAX_WHOLE_ANSWER - prompt_units) // max(1, n * units_per_token)
        max_tokens = max(1, start.sampling.min_tokens, min(max_tokens, room))
    output_units = n * max_tokens * units_per_token
    if prompt_units + output_units > MAX_WHOLE_ANSWER:
        field = "output.prompt_logprobs" if prompt_units > output_units else field
        remedy = "reduce one of them, or call GenerateOne, which streams the output"
        raise too_expensive(field, formula, prompt_units + output_units, MAX_WHOLE_ANSWER, remedy)
    return max_tokens


def _units(num_bytes: int) -> int:
    return -(-num_bytes // 8)


def too_expensive(field: str, formula: str, value: int, limit: int, remedy: str = "reduce one of them") -> ServiceError:
    """Returns the error for a cost above its limit. ``value`` is the result of ``formula``."""
    return ServiceError(
        Reason.TOO_EXPENSIVE, f"{field}: {formula} must be at most {limit:,}; it is {value:,}; {remedy}", field=field
    )
