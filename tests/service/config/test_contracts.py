"""--contracts: a list of names, each known and with its package."""

import importlib

import pytest

from penstock.service.config import contracts
from penstock.service.config.contracts import CONTRACTS, read_contracts
from penstock.service.config.flags import ConfigError
from penstock.service.config.serve_config import ServeConfig


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_contract_has_its_module(name):
    if not CONTRACTS[name].is_installed:
        pytest.skip(f"{name} needs a package that is not installed")
    assert callable(importlib.import_module(CONTRACTS[name].module).add_to_server)


def test_names_are_listed_and_none_is_the_default():
    assert read_contracts(ServeConfig().contracts) == ()
    assert read_contracts("vllm, vllm ,") == ("vllm",)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"^--contracts: there is no contract 'vlm'; did you mean vllm\?; there"):
        ServeConfig(contracts="vlm")


@pytest.mark.parametrize("package", ["no_such_package", "no_such_package.v1.messages", "json.no_such_module"])
def test_a_missing_package_is_refused_with_the_extra_that_has_it(monkeypatch, package):
    missing = CONTRACTS["vllm"]._replace(package=package)
    monkeypatch.setattr(contracts, "CONTRACTS", {"vllm": missing})
    with pytest.raises(ConfigError, match=r"pip install 'penstock-llm\[smg\]', or omit it$"):
        ServeConfig(contracts="vllm")
