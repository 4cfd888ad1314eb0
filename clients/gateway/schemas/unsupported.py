"""The list of OpenAI's and vLLM's fields that this service does not support or does not need.

A field that would change the answer is refused by name, unless its value has no effect. A field that changes nothing is
ignored. A field in neither list and in no schema is refused as unknown: a typo that is ignored costs more than one that
is reported.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from penstock.clients.gateway.errors import GatewayError, invalid

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "cache_salt": (None,),
    "chat_template": (None,),  # a caller's template would be a program
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1.0),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "repetition_detection": (None,),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),
    "web_search_options": (None,),
}
"""The values that have no effect, and so are accepted, by field."""

IGNORED = frozenset(
    {
        "metadata",
        "prediction",  # a hint that may save time; only chats use it
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",  # only responses are stored
        "user",
    }
)
"""Fields that do not change the answer."""


def without_foreign_fields(
    body: Any,
    known: Collection[str],
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
    ignored: Collection[str] = IGNORED,
) -> Any:
    """Returns a body with only the fields of its schema. Raises GatewayError for other fields, unless they have no
    effect."""
    if not isinstance(body, dict):
        return body
    kept = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            if value not in unsupported[name]:
                raise invalid(name, "is not supported by this service yet", code="unsupported_parameter")
        elif name not in ignored:
            near = difflib.get_close_matches(shown(name), known, n=1)  # a name may be as long as a body
            hint = f"; did you mean {near[0]}?" if near else ""
            raise invalid(shown(name), f"unknown field{hint}", code="unknown_parameter")
    return kept


def shown(name: str) -> str:
    """Returns a name from a request, shortened and safe to send."""
    name = name.encode(errors="replace").decode()
    return name if len(name) <= 60 else name[:57] + "..."


def model_not_found(name: str, served: str) -> GatewayError:
    """Returns the error for a model that is not served."""
    message = f"model: {shown(name)} is not served here; there is {served}"
    return GatewayError(404, message, param="model", code="model_not_found")
