"""The caller's names of fields, for errors of the service, which names the fields of the contract."""

import re
from collections.abc import Sequence

Names = Sequence[tuple[str, str]]
"""Pairs of a pattern, which matches a field of the contract from its beginning up to the end of a name or of an index,
and its replacement. The first match counts; the rest of the field stays."""

IDEMPOTENCY_KEY = "Idempotency-Key"
"""The header that is the contract's ``idempotency_key``."""
CHAT_NAMES: Names = (
    (r"chat\.messages(\[\d+\]\.tool_calls\[\d+\])\.name", r"messages\1.function.name"),
    (r"chat\.messages(\[\d+\]\.tool_calls\[\d+\])\.arguments_json", r"messages\1.function.arguments"),
    (r"chat\.tools(\[\d+\])\.function\.parameters_json", r"tools\1.function.parameters"),
    (r"prediction\.text", "prediction.content"),
    (r"chat\.template_variables_json", "chat_template_kwargs"),
    (r"chat\.", ""),
    (r"chat", "messages"),
    (r"token_ids(\.ids)?(\[\d+\])?", "messages"),
    (r"output\.logprobs", "top_logprobs"),
)
_COMMON: Names = ((r"(sampling|output|chat)\.", ""), (r"idempotency_key", IDEMPOTENCY_KEY))


def caller_name(field: str, names: Names = ()) -> str:
    """The caller's name of a field of the contract, such as ``start.sampling.max_tokens``."""
    field = field.removeprefix("start.")
    for pattern, name in (*names, *_COMMON):
        found = re.match(rf"{pattern}(?=[.\[]|$|(?<=\.))", field)
        if found is not None:
            return found.expand(name) + field[found.end() :]
    return field
