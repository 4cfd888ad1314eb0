"""Reads pages of a server on this machine over HTTP."""

import ssl
import urllib.request

import httpx

_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""By default each client reads all certificate authorities, which takes longer than many a test."""


def plain_client(base: str) -> httpx.AsyncClient:
    """Returns a client for URLs that begin with ``base``, over HTTP without TLS."""
    return httpx.AsyncClient(base_url=base, timeout=120, trust_env=False, verify=_NO_CERTIFICATES)


def fetch(target: str, accept: str = "", path: str = "/metrics") -> str:
    """Returns the body; raises urllib.error.HTTPError for any other status than 200."""
    request = urllib.request.Request(f"http://{target}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())
