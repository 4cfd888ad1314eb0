"""Limits on the total cost of a generation request."""

from penstock.service.errors import Reason, ServiceError

MAX_TOKENS_IN_ALL = 1 << 20
"""The maximum total of prompt and output tokens of a request's choices, if it has several. A step's bookkeeping on the
event loop grows with it."""
MAX_LOGPROB_ENTRIES = 1 << 22
"""The maximum number of log-probabilities of a request's output, and of its prompt."""


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


def too_expensive(field: str, formula: str, value: int, limit: int, remedy: str = "reduce one of them") -> ServiceError:
    """Returns the error for a cost that exceeds its limit. ``formula``: how it is computed."""
    return ServiceError(
        Reason.TOO_EXPENSIVE, f"{field}: {formula} must be at most {limit:,}; it is {value:,}; {remedy}", field=field
    )
