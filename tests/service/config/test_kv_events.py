"""--kv-events-config has vLLM's keys; each error names the key and its correct values."""

import json
import socket
from typing import Any

import pytest

from penstock.models.errors import ModelError
from penstock.service.app.prepare import prepare
from penstock.service.config.addresses import ListenError
from penstock.service.config.flags import ConfigError
from penstock.service.config.kv_events import KvEventsConfig
from penstock.service.config.serve_config import ServeConfig

ALL: dict[str, Any] = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:7557",
    "replay_endpoint": "tcp://*:7558",
    "buffer_steps": 7,
    "hwm": 8,
    "max_queue_size": 9,
    "topic": "kv@pod@model",
}


def config_of(**keys):
    return ServeConfig(kv_events_config=json.dumps(keys)).kv_events


def test_every_key_of_vllm_is_known():
    assert config_of(**ALL) == KvEventsConfig(**ALL)
    defaults = KvEventsConfig(enable_kv_cache_events=True)
    assert config_of(enable_kv_cache_events=True) == defaults
    assert (defaults.endpoint, defaults.buffer_steps, defaults.hwm) == ("tcp://*:5557", 10_000, 100_000)


def test_events_are_off_without_being_enabled():
    assert ServeConfig().kv_events is None
    assert config_of() is None
    assert config_of(enable_kv_cache_events=False, endpoint="tcp://*:7557") is None
    assert config_of(enable_kv_cache_events=True, publisher="null") is None


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"port": 1}, "port: there is no such key; there are enable_kv_cache_events, "),
        ({"enable_kv_cache_events": 1}, "must be true or false; it is 1"),
        ({"publisher": "nats"}, 'must be "zmq" or "null"; it is \'nats\''),
        ({"publisher": "zmq"}, "needs enable_kv_cache_events: true"),
        ({"endpoint": "http://x:1"}, "must be an address such as"),
        ({"endpoint": None}, "must be an address such as"),
        ({"replay_endpoint": 5}, "must be an address such as"),
        ({"replay_endpoint": "tcp://*:5557"}, "must differ from endpoint"),
        ({"buffer_steps": 0}, "must be a whole number from 1 to 1,000,000; it is 0"),
        ({"hwm": True}, "must be a whole number from 1 to 2,147,483,647; it is True"),
        ({"max_queue_size": "many"}, "must be a whole number from 1 to 1,000,000; it is 'many'"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "to listen on all addresses, write tcp://*:5557"),
        ({"endpoint": "ipc:///run/\ud800"}, "must be an address such as"),
        ({"topic": "t" * 513}, "must be a text of at most 512 bytes"),
        ({"topic": "\ud800"}, "must be a text of at most 512 bytes in UTF-8"),
    ],
)
def test_a_wrong_key_is_named(keys, problem):
    with pytest.raises(ConfigError) as caught:
        config_of(**keys)
    assert str(caught.value).startswith(f"--kv-events-config: {next(iter(keys))}: ")
    assert problem in str(caught.value)


def test_events_need_the_prefix_cache():
    text = json.dumps({"enable_kv_cache_events": True})
    with pytest.raises(ConfigError, match="--kv-events-config: needs prefix caching"):
        ServeConfig(kv_events_config=text, enable_prefix_caching=False)


@pytest.mark.parametrize("text", ["{", "[]", '"zmq"'])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match=r"^--kv-events-config: "):
        ServeConfig(kv_events_config=text)


def start(**keys):
    """Prepares a service of a model that does not exist: addresses are checked before the model."""
    text = json.dumps({"enable_kv_cache_events": True, **keys})
    prepare(ServeConfig(model="/nowhere", port=0, admin_listen="off", metrics_listen="off", kv_events_config=text))


def test_without_the_extra_the_start_is_refused_with_its_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ListenError, match=r"not installed: pyzmq; pip install 'penstock-llm\[zmq\]'"):
        start()


def test_an_address_that_cannot_be_had_is_found_before_the_model_is_read():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=r"--kv-events-config: replay_endpoint: cannot listen on tcp.* in use"):
            start(endpoint="tcp://*:0", replay_endpoint=address)
    with pytest.raises(ListenError, match=r"--kv-events-config: endpoint: cannot listen on ipc:///nowhere/kv"):
        start(endpoint="ipc:///nowhere/kv")
    with pytest.raises(ModelError):
        start(endpoint="tcp://127.0.0.1:0")
