"""Parses ``--kv-events-config``: how the prefix cache's changes are published, as JSON with vLLM's names."""

import json
import re
from dataclasses import dataclass, fields
from typing import Any

from penstock.service.config.flags import ConfigError

_FLAG = "--kv-events-config"
_EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'
_TEXT = re.compile(r"[^\ud800-\udfff]*")
"""What UTF-8 has bytes for. JSON can have halves of a character."""
_ENDPOINT = re.compile(r"tcp://\S+:([0-9]{1,5}|\*)|ipc://\S+")
_ALL_HOSTS = "tcp://0.0.0.0:"
_MAX_ENDPOINT_BYTES = 256
_MAX_TOPIC_BYTES = 512
_LIMITS = {"buffer_steps": (1, 1_000_000), "hwm": (1, 2**31 - 1), "max_queue_size": (1, 1_000_000)}


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """The keys and their defaults are vLLM's."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """``zmq`` or ``null``, which publishes nothing; None: ``zmq`` if events are enabled."""
    endpoint: str = "tcp://*:5557"
    """The address at which batches are published. The service listens on an ``ipc://`` address, and on a ``tcp://`` one
    with a ``*`` or port 0. It connects to any other address, where a subscriber must listen."""
    replay_endpoint: str | None = None
    """The address for requests to replay earlier batches; None: no replay."""
    buffer_steps: int = 10_000
    """The number of batches that can be replayed."""
    hwm: int = 100_000
    """The number of batches that wait for a slow subscriber. It misses later ones."""
    max_queue_size: int = 100_000
    """The number of batches that wait to be published. If there are more, the oldest are not published, but can be
    replayed."""
    topic: str = ""
    """The first part of each message. llm-d expects ``kv@POD@MODEL``."""

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_kv_events(text: str) -> KvEventsConfig:
    """Parses a configuration from JSON text. Raises ConfigError, with the key and its correct values."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_FLAG}: is not valid JSON ({error}); write it as {_EXAMPLE}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{_FLAG}: must be an object, such as {_EXAMPLE}")
    known = [field.name for field in fields(KvEventsConfig)]
    for key, value in given.items():
        if key not in known:
            raise _wrong(key, f"there is no such key; there are {', '.join(known)}")
        _check(key, value)
    config = KvEventsConfig(**given)
    if config.publisher == "zmq" and not config.enable_kv_cache_events:
        raise _wrong("publisher", "needs enable_kv_cache_events: true; add that, or leave publisher out")
    if config.endpoint == config.replay_endpoint and not config.endpoint.endswith((":0", ":*")):
        raise _wrong("replay_endpoint", f"must differ from endpoint; both are {config.endpoint}")
    return config


def _check(key: str, value: Any) -> None:
    if key == "enable_kv_cache_events":
        if not isinstance(value, bool):
            raise _wrong(key, f"must be true or false; it is {value!r}")
    elif key == "publisher":
        if value not in ("zmq", "null", None):
            raise _wrong(key, f'must be "zmq" or "null"; it is {value!r}')
    elif key in _LIMITS:
        low, high = _LIMITS[key]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong(key, f"must be a whole number from {low:,} to {high:,}; it is {value!r}")
    elif key == "topic":
        if not (isinstance(value, str) and _TEXT.fullmatch(value) and len(value.encode()) <= _MAX_TOPIC_BYTES):
            raise _wrong(key, f"must be a text of at most {_MAX_TOPIC_BYTES} bytes in UTF-8")
    elif not (key == "replay_endpoint" and value is None):
        is_text = isinstance(value, str) and len(value) <= _MAX_ENDPOINT_BYTES and _TEXT.fullmatch(value)
        if not (is_text and _ENDPOINT.fullmatch(value)):
            raise _wrong(key, f'must be an address such as "tcp://*:5557" or "ipc:///run/kv.sock"; it is {value!r}')
        if key == "endpoint" and value.startswith(_ALL_HOSTS):
            remedy = value.replace(_ALL_HOSTS, "tcp://*:")
            raise _wrong(key, f"the service would connect to {value}; to listen on all addresses, write {remedy}")


def _wrong(key: str, problem: str) -> ConfigError:
    return ConfigError(f"{_FLAG}: {key}: {problem}")
