"""The flags of LoRA adapters."""

from pathlib import Path

import pytest

from penstock.service.app.prepare import prepare
from penstock.service.config.command_line import parse_config
from penstock.service.config.flags import ConfigError
from penstock.service.config.serve_config import ServeConfig


def test_by_default_there_are_none():
    assert ServeConfig().num_adapter_slots == 0
    assert ServeConfig().adapters == {}


def test_names_and_directories():
    config = parse_config(["--lora-modules", "a=/x/a, b/c=y=z"])
    assert config.adapters == {"a": "/x/a", "b/c": str(Path("y=z").absolute())}
    assert (config.num_adapter_slots, config.max_lora_rank) == (4, 16)
    config = parse_config(["--lora-modules", "a=/x", "--max-loras", "9", "--max-lora-rank", "256"])
    assert (config.num_adapter_slots, config.max_lora_rank) == (9, 256)


def test_they_reach_the_worker_and_the_server():
    config = ServeConfig(port=0, admin_listen="off", metrics_listen="off", lora_modules="a=/x", max_lora_rank=8)
    prepared = prepare(config)
    assert (prepared.worker.max_loras, prepared.worker.max_lora_rank) == (4, 8)
    assert prepared.server.lora_modules == {"a": "/x"}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"lora_modules": "a"}, "--lora-modules: must be NAME=PATH"),
        ({"lora_modules": "=x"}, "--lora-modules: must be NAME=PATH"),
        ({"lora_modules": "a=x,a=y"}, "--lora-modules: a occurs twice"),
        ({"lora_modules": "demo=x"}, "--lora-modules: demo is the model's own name"),
        ({"lora_modules": "a=x", "max_loras": 0}, "--lora-modules: needs room"),
        ({"lora_modules": "a=x", "tensor_parallel_size": 2}, "--lora-modules.*--tensor-parallel-size"),
        ({"max_loras": 1, "pipeline_parallel_size": 2}, "--max-loras.*--pipeline-parallel-size"),
        ({"max_loras": 1, "backend": "transformers"}, "--max-loras.*--backend transformers"),
        ({"max_lora_rank": 257}, "--max-lora-rank"),
        ({"max_loras": 1, "enable_lora_routes": True}, "--enable-lora-routes: needs --http-port"),
        ({"http_port": 0, "enable_lora_routes": True}, "--enable-lora-routes: needs --max-loras"),
    ],
)
def test_flags_that_are_refused(flags, problem):
    with pytest.raises(ConfigError, match=problem):
        ServeConfig(**flags)
