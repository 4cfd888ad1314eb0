"""The one list of what OpenAI's and vLLM's requests may say that this service cannot do, or need not.

A field that would change the answer is refused by name, unless it has a value that asks for nothing. One that changes
nothing is passed over. What is in neither list and in no schema is refused as unknown: a typing error that is passed
over costs more than one that is told.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from penstock.clients.gateway.errors import GatewayError, invalid

NOT_YET = "is not supported by this service yet"

_GRAMMARS = dict.fromkeys(
    (
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "structural_tag",
    ),
    (None,),
)
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **_GRAMMARS,
    "audio": (None,),
    "cache_salt": (None,),
    "chat_template": (None,),  # a template of a caller's would be a program of a caller's
    "function_call": (None, "none"),
    "functions": (None, []),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1.0),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "repetition_detection": (None,),
    "spaces_between_special_tokens": (None, True),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
}
"""By field, the values that ask for nothing."""

IGNORED = frozenset(
    {
        "metadata",
        "prediction",  # a hint that may save time
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",  # nothing is stored
        "user",
    }
)
"""Fields that change nothing of the answer."""


def without_foreign_fields(body: Any, known: Collection[str]) -> Any:
    """A request's body with the fields of its schema alone. Raises GatewayError for others that ask for something."""
    if not isinstance(body, dict):
        return body
    kept = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name in UNSUPPORTED:
            if value not in UNSUPPORTED[name]:
                raise invalid(name, NOT_YET, code="unsupported_parameter")
        elif name not in IGNORED:
            near = difflib.get_close_matches(shown(name), known, n=1)  # a name may be as long as a body
            hint = f"; did you mean {near[0]}?" if near else ""
            raise invalid(shown(name), f"unknown field{hint}", code="unknown_parameter")
    return kept


def shown(name: str) -> str:
    """A name out of a request, short, and text that can be sent."""
    name = name.encode(errors="replace").decode()
    return name if len(name) <= 60 else name[:57] + "..."


def model_not_found(name: str, served: str) -> GatewayError:
    """The caller asked for another model."""
    message = f"model: {shown(name)} is not served here; there is {served}"
    return GatewayError(404, message, param="model", code="model_not_found")
