"""--contracts: a list of names, each known and with its package."""

import importlib

import pytest

from penstock.service.config import contracts
from penstock.service.config.contracts import CONTRACTS, read_contracts
from penstock.service.config.flags import ConfigError
from penstock.service.config.serve_config import ServeConfig


def test_every_contract_has_its_module():
    for contract in CONTRACTS.values():
        assert callable(importlib.import_module(contract.module).add_to_server)


def test_names_are_listed_and_none_is_the_default():
    assert read_contracts(ServeConfig().contracts) == ()
    assert read_contracts("vllm, vllm ,") == ("vllm",)
    assert read_contracts("kserve,vllm") == ("kserve", "vllm")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"^--contracts: there is no contract 'vlm'; did you mean vllm\?; there"):
        ServeConfig(contracts="vlm")


def test_a_missing_package_is_refused_with_the_extra_that_has_it(monkeypatch):
    missing = CONTRACTS["vllm"]._replace(package="no_such_package")
    monkeypatch.setattr(contracts, "CONTRACTS", {"vllm": missing})
    with pytest.raises(ConfigError, match=r"pip install 'penstock-llm\[smg\]', or omit it$"):
        ServeConfig(contracts="vllm")
