"""Reads a page over HTTP, without a client of the gateway."""

import urllib.request


def fetch(target: str, accept: str = "", path: str = "/metrics") -> str:
    """Returns the body; raises urllib.error.HTTPError for any other status than 200."""
    request = urllib.request.Request(f"http://{target}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())
