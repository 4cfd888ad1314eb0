"""compose.yaml of smg: both programs accept their flags, and only smg can reach the services."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.service.config.command_line import parse_config
from penstock.service.config.contracts import read_contracts

COMPOSE: Any = yaml.safe_load((Path(__file__).parents[2] / "deploy/smg/compose.yaml").read_text(encoding="utf-8"))
DEFAULTS = re.compile(r"\$\{\w+:-([^}]*)\}")
REPLICAS = ("one", "two")


def test_the_services_have_the_contract() -> None:
    for name in REPLICAS:
        variables = COMPOSE["services"][name]["environment"]
        config = parse_config([], {key: DEFAULTS.sub(r"\1", value) for key, value in variables.items()})
        assert read_contracts(config.contracts) == ("vllm",)
        assert "args" not in COMPOSE["services"][name]["build"], "the default of PACKAGE has the contract's messages"


def test_smg_accepts_its_flags_and_calls_the_services() -> None:
    launch_router = pytest.importorskip("smg.launch_router", reason="smg is not installed")
    word, *flags = COMPOSE["services"]["smg"]["command"]
    assert word == "launch"
    parsed = launch_router.parse_router_args(flags)
    assert parsed.worker_urls == [f"grpc://{name}:50051" for name in REPLICAS]
    port = parsed.port
    assert COMPOSE["services"]["smg"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_only_smg_can_be_reached() -> None:
    assert COMPOSE["networks"]["engines"] == {"internal": True}
    for name in REPLICAS:
        assert COMPOSE["services"][name]["networks"] == ["engines"]
        assert "ports" not in COMPOSE["services"][name]
