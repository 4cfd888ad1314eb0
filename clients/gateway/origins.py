"""``--allowed-origins``: the origins whose web pages may call the gateway."""

import re

import msgspec

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*]+")


def read_origins(text: str) -> tuple[str, ...]:
    """Reads a list of origins, separated by commas, or in JSON as in vLLM. Raises ValueError."""
    if text.startswith("["):
        try:
            listed = msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError:
            raise ValueError(f"must be a list of origins; it is {text!r}") from None
    else:
        listed = text.split(",")
    origins = tuple(dict.fromkeys(each.strip().lower() for each in listed if each.strip()))
    for origin in origins:
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"must be origins without a path, such as https://app.example.com or http://localhost:3000, or *; it "
                f"has {origin!r}"
            )
    return origins
