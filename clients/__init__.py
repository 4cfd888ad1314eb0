"""The client: what callers import or run. Depends on the contract in penstock.v1, not on the server.

from penstock.clients import Client

print(Client("127.0.0.1:50051").complete("Once upon a time", max_tokens=20).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.clients.channel import Tls
    from penstock.clients.classification import Classes, Scores
    from penstock.clients.client import AsyncClient
    from penstock.clients.embeddings import Embeddings
    from penstock.clients.errors import InvalidOption, PenstockError, RequestFailed, StreamBroken, Unreachable
    from penstock.clients.events import (
        Accepted,
        Completion,
        Delta,
        Finished,
        FinishReason,
        FrameRefused,
        Injected,
        PromptLogprobs,
    )
    from penstock.clients.request_stream import RequestStream
    from penstock.clients.sync_client import Client, SyncRequestStream

__all__ = [
    "Accepted",
    "AsyncClient",
    "Classes",
    "Client",
    "Completion",
    "Delta",
    "Embeddings",
    "FinishReason",
    "Finished",
    "FrameRefused",
    "Injected",
    "InvalidOption",
    "PenstockError",
    "PromptLogprobs",
    "RequestFailed",
    "RequestStream",
    "Scores",
    "StreamBroken",
    "SyncRequestStream",
    "Tls",
    "Unreachable",
]


def __getattr__(name: str) -> object:
    """Imports a public name on first use: ``penstock --help`` does not need grpc."""
    if name in __all__:
        for module in ("errors", "events", "channel", "embeddings", "classification", "client", "sync_client"):
            if found := getattr(import_module(f"{__name__}.{module}"), name, None):
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
