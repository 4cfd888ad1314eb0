"""The arguments of the application, and the example of a configuration file."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.clients.errors import InvalidOption
from penstock.clients.ray.application import serve_arguments
from penstock.service.config.command_line import parse_config

EXAMPLE = Path(__file__).parents[3] / "deploy/ray/serve.yaml"


@pytest.fixture(scope="module")
def app() -> Any:
    pytest.importorskip("ray.serve", reason="ray is not installed")
    from penstock.clients.ray import app

    return app


def options_of(application: Any) -> Any:
    return application._bound_deployment


def test_flags_are_those_of_penstock_serve() -> None:
    flags = {
        "model": "demo",
        "max_num_seqs": "8",
        "enable_prefix_caching": "False",
        "deterministic": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        "revision": "0010",
        "chat_template": None,
    }
    config = parse_config(list(serve_arguments(flags)))
    assert (config.model, config.max_num_seqs, config.revision) == ("demo", 8, "0010")
    assert (config.enable_prefix_caching, config.deterministic, config.chat_template) == (False, True, None)
    assert config.speculation is not None
    assert config.speculation.num_speculative_tokens == 2


@pytest.mark.soak
@pytest.mark.parametrize("name", ["port", "http-port", "listen", "config", "tls_cert"])
def test_listeners_and_tls_are_refused(app: Any, name: str) -> None:
    with pytest.raises(InvalidOption, match=name.replace("-", "_")):
        app({"model": "demo", name: "1"})


@pytest.mark.soak
def test_a_max_num_seqs_that_is_not_a_number_is_named(app: Any) -> None:
    with pytest.raises(InvalidOption, match=r"max_num_seqs.*positive integer"):
        app({"max-num-seqs": "many"})


@pytest.mark.soak
def test_options_of_the_command_line_are_yaml(app: Any) -> None:
    deployment = options_of(app({"autoscaling_config": "{min_replicas: 1, max_replicas: 3}", "num_cpus": "2"}))
    assert deployment.name == "penstock"
    assert deployment._deployment_config.autoscaling_config.max_replicas == 3
    assert deployment.ray_actor_options["num_cpus"] == 2
    assert deployment.init_args == (["--threads=2"], 60.0)


@pytest.mark.soak
def test_a_replica_takes_the_requests_of_a_step_and_uses_its_gpus(app: Any) -> None:
    deployment = options_of(
        app({"num_replicas": "2", "num_gpus": 4, "max-num-seqs": "8", "graceful_shutdown_timeout_s": 5})
    )
    assert (deployment.num_replicas, deployment.max_ongoing_requests) == (2, 8)
    assert deployment.init_args == (["--tensor-parallel-size=4", "--max-num-seqs=8"], 5.0)
    assert options_of(app({})).max_ongoing_requests == 256


@pytest.mark.soak
def test_the_example_is_valid(app: Any) -> None:
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    given = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    schema = ServeDeploySchema.model_validate(given)
    assert given.keys() <= ServeDeploySchema.model_fields.keys()
    assert given["http_options"].keys() <= type(schema.http_options).model_fields.keys()
    assert given["grpc_options"].keys() <= type(schema.grpc_options).model_fields.keys()
    functions = gRPCOptions(**given["grpc_options"]).grpc_servicer_func_callable
    assert len(functions) == len(given["grpc_options"]["grpc_servicer_functions"])
    (application,) = schema.applications
    assert application.import_path == "penstock.clients.ray:app"
    assert given["applications"][0].keys() <= type(application).model_fields.keys()
    arguments, _ = options_of(app(application.args)).init_args
    assert parse_config(arguments).model == "demo"
