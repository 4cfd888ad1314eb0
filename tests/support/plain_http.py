"""A client of a server on this machine."""

import ssl

import httpx

_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""By default each client reads all certificate authorities, which takes longer than many a test."""


def plain_client(base: str) -> httpx.AsyncClient:
    """Returns a client for URLs that begin with ``base``, over HTTP without TLS."""
    return httpx.AsyncClient(base_url=base, timeout=120, trust_env=False, verify=_NO_CERTIFICATES)
