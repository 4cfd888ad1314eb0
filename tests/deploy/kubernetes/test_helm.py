"""The Helm chart and the files for KServe: what they render is valid, and fits the service's flags and metrics."""

import dataclasses
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.manifests import (
    Manifest,
    container,
    environment,
    find,
    pod,
    pod_template,
    volume_claims,
)
from jsonschema import Draft202012Validator

from penstock.clients.gateway.server.flags import make_parser
from penstock.clients.health import LIVENESS
from penstock.service.config.addresses import LIVE_PATH, READY_PATH
from penstock.service.config.command_line import PREFIX, parse_config
from penstock.service.config.flags import ConfigError
from penstock.service.config.serve_config import ServeConfig
from penstock.service.telemetry.catalog import INSTRUMENTS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/penstock"
EXAMPLES = ["cpu", "gpu", "full", "hosts"]
RENDERED = [None, *EXAMPLES]
"""The chart's own values, and the examples."""
KUBERNETES = ("1.31", "1.37")
CUSTOM = json.loads(Path(__file__).with_name("custom_resources.json").read_text())
KSERVE = sorted((DEPLOY / "kserve").glob("*.yaml"))
UNUSED = {"listen", "distributed_executor_backend", "ray_address"}
"""Flags for which the chart has no use: it sets a port, and LeaderWorkerSet places workers, not Ray."""
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

Render = Callable[..., list[Manifest]]
Helm = Callable[..., subprocess.CompletedProcess[str]]


def custom_kind(manifest: Manifest) -> str:
    return f"{manifest['apiVersion']} {manifest['kind']}"


# ---------------------------------------------------------------------------------------------------------- rendering


@pytest.mark.parametrize("example", RENDERED)
def test_lint_passes(helm: Helm, example: str | None) -> None:
    files = [] if example is None else ["-f", DEPLOY / f"helm/values-examples/{example}.yaml"]
    done = helm("lint", "--strict", CHART, *files)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", RENDERED)
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_own_resources_are_valid(render: Render, example: str | None, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    own = [each for each in render(example) if custom_kind(each) not in CUSTOM]
    assert len(own) >= 4
    for manifest in own:
        validate(manifest, version, strict=True)


def test_what_no_example_uses_is_valid_too(render: Render) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    metric = {"name": "penstock_waiting_choices", "averageValue": "8"}
    manifests = render(
        autoscaling={"hpa": {"enabled": True, "podMetrics": [metric]}},
        apiKeys={"content": "sha256:00 tenant\n"},
        networkPolicy={"enabled": True, "egress": [{"ports": [{"port": 53, "protocol": "UDP"}]}]},
        extraVolumes=[{"name": "weights", "hostPath": {"path": "/weights"}}],
        extraVolumeMounts=[{"name": "weights", "mountPath": "/weights", "readOnly": True}],
        extraArgs=["--log-level=debug"],
        model={"name": "/weights", "offline": True},
        labels={"team": "search"},
        podLabels={"tier": "gold"},
        podAnnotations={"note": "x"},
        serviceAccount={"name": "penstock"},
        priorityClassName="high",
        strategy={"type": "Recreate", "rollingUpdate": None},
        service={"type": "LoadBalancer", "annotations": {"note": "x"}},
    )
    for manifest in manifests:
        validate(manifest, KUBERNETES[-1], strict=True)
    scaler = find(manifests, "HorizontalPodAutoscaler")["spec"]
    assert [each["type"] for each in scaler["metrics"]] == ["Resource", "Pods"]
    deployment = find(manifests, "Deployment")
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]
    assert find(manifests, "Secret")["stringData"] == {"keys": "sha256:00 tenant\n"}
    serve = container(manifests)
    assert parse_config(serve["args"], environment(serve)).log_level == "debug"


@pytest.mark.parametrize("example", EXAMPLES)
def test_custom_resources_have_known_fields(render: Render, example: str) -> None:
    for manifest in render(example):
        if schema := CUSTOM.get(custom_kind(manifest)):
            Draft202012Validator(schema).validate(manifest["spec"])


def test_the_examples_have_every_kind_of_custom_resource(render: Render) -> None:
    rendered = {custom_kind(each) for example in EXAMPLES for each in render(example)}
    served = {custom_kind(yaml.safe_load(file.read_text())) for file in KSERVE}
    assert rendered | served >= set(CUSTOM) - {"$comment"}


def test_the_version_is_that_of_penstock() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["appVersion"] == version
    for file in (DEPLOY / "kserve/servingruntime.yaml", DEPLOY / "helm/values-examples/full.yaml"):
        assert version in file.read_text()


# --------------------------------------------------------------------------------------------------- flags and metrics


@pytest.mark.parametrize("example", RENDERED)
def test_every_variable_is_a_flag_with_a_valid_value(render: Render, example: str | None) -> None:
    serve = container(render(example))
    variables = environment(serve)
    config = parse_config(serve.get("args", []), variables)
    assert config.metrics_listen == "[10.1.2.3]:50053"
    assert config.admin_listen == "127.0.0.1:50052"
    named = {name.removeprefix(PREFIX).lower() for name in variables if name.startswith(PREFIX)}
    assert named <= {field.name for field in dataclasses.fields(ServeConfig)}


def test_a_variable_that_is_not_a_flag_is_found(render: Render) -> None:
    serve = container(render(extraEnv=[{"name": "PENSTOCK_SERVE_MAX_SEQS", "value": "1"}]))
    with pytest.raises(ConfigError, match="PENSTOCK_SERVE_MAX_SEQS"):
        parse_config([], environment(serve))


def test_numbers_objects_and_switches_become_texts_that_flags_accept(render: Render) -> None:
    flags = {
        "max-queued-tokens": 4_000_000,
        "enable-prefix-caching": False,
        "speculative-config": {"method": "ngram", "num_speculative_tokens": 3},
        "kv-cache-memory-bytes": 12_000_000_000,
        "conversation-tokens": 1_000_000_000,
    }
    config = parse_config([], environment(container(render(flags=flags))))
    assert config.max_queued_tokens == 4_000_000
    assert config.kv_cache_memory_bytes == 12_000_000_000
    assert config.conversation_tokens == 1_000_000_000
    assert config.enable_prefix_caching is False
    assert config.speculation is not None
    assert config.speculation.num_speculative_tokens == 3


def test_the_gateways_container_has_valid_flags(render: Render) -> None:
    gateway = container(render("full"), "gateway")
    arguments = make_parser().parse_args([each.replace("$(POD_IP)", "10.1.2.3") for each in gateway["args"]])
    assert arguments.metrics_target == "[10.1.2.3]:50053"
    assert arguments.tls_server_name == "penstock.llm.svc"


def test_kserves_runtime_has_valid_flags_and_fields() -> None:
    for file in KSERVE:
        manifest = yaml.safe_load(file.read_text())
        Draft202012Validator(CUSTOM[custom_kind(manifest)]).validate(manifest["spec"])
        assert file.read_text().startswith("# Not run here")
    runtime = yaml.safe_load((DEPLOY / "kserve/servingruntime.yaml").read_text())["spec"]
    (serve,) = runtime["containers"]
    config = parse_config([each.replace("{{.Name}}", "qwen3") for each in serve["args"]])
    assert (config.http_port, config.model_name) == (8080, "qwen3")
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    spec = {"containers": runtime["containers"], "volumes": runtime["volumes"]}
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, KUBERNETES[-1], strict=True)


def test_autoscalers_query_metrics_that_exist(render: Render) -> None:
    names = {each.prometheus_name for each in INSTRUMENTS}
    queries = [each["metadata"]["query"] for each in find(render("full"), "ScaledObject")["spec"]["triggers"]]
    assert [re.findall(r"(\w+)\{", query) for query in queries] == [
        ["penstock_waiting_choices"],
        ["penstock_kv_usage_ratio"],
    ]
    comment = re.findall(r"name: (penstock_\w+)", (CHART / "values.yaml").read_text())
    assert comment
    pages = (ROOT / "docs/kubernetes.md").read_text()
    assert {*re.findall(r"penstock_\w+|vllm:\w+", pages), *comment, "penstock_kv_usage_ratio"} <= names


def test_the_queries_select_the_service_that_the_monitor_selects(render: Render) -> None:
    manifests = render("full")
    selected = find(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    services = [each for each in manifests if each["kind"] == "Service"]
    (headless,) = (each for each in services if selected.items() <= each["metadata"]["labels"].items())
    assert headless["spec"]["clusterIP"] == "None"
    query = find(manifests, "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    assert f'{{namespace="llm",service="{headless["metadata"]["name"]}"}}' in query


# ------------------------------------------------------------------------------------------------------ values.schema


def test_the_schema_has_every_flag_that_the_chart_does_not_set(render: Render) -> None:
    everything: dict[str, Any] = {
        "tls": {"secret": "tls", "clientCA": True},
        "apiKeys": {"secret": "keys"},
        "tenants": {"content": {"default": {}}},
        "http": {"enabled": True, "allowedOrigins": ["https://app.example.com"]},
        "model": {"revision": "main"},
    }
    everything["hosts"] = {"size": 2, "tls": {"secret": "join"}}
    variables = environment(container(render(**everything)))
    set_by_chart = {name.removeprefix(PREFIX).lower() for name in variables if name.startswith(PREFIX)}
    set_by_chart -= {"tensor_parallel_size", "pipeline_parallel_size", "join_timeout"}  # unless a flag sets them
    others = {field.name for field in dataclasses.fields(ServeConfig)} - set_by_chart - UNUSED
    assert {name.replace("-", "_") for name in SCHEMA["properties"]["flags"]["properties"]} == others


def test_flags_have_the_types_and_bounds_of_the_service() -> None:
    fields = {field.name: field for field in dataclasses.fields(ServeConfig)}
    for name, schema in SCHEMA["properties"]["flags"]["properties"].items():
        field = fields[name.replace("-", "_")]
        kind = "boolean" if "bool" in str(field.type) else schema["type"]
        assert schema["type"] == kind, name
        if schema["type"] in ("integer", "number"):
            assert (schema.get("minimum"), schema.get("maximum")) == (field.metadata["low"], field.metadata["high"])
        assert schema.get("enum") == (None if field.metadata["choices"] is None else list(field.metadata["choices"]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ('{"replicas": "two"}', "/replicas': got string, want integer"),
        ('{"flags": {"max-num-seq": 4}}', "additional properties 'max-num-seq' not allowed"),
        ('{"flags": {"port": 4}}', "additional properties 'port' not allowed"),
        ('{"flags": {"quantization": "int3"}}', "value must be one of 'none', 'int8'"),
        ('{"flags": {"max-num-seqs": 0}}', "minimum: got 0, want 1"),
        ('{"imagePullPolicy": "Always"}', "additional properties 'imagePullPolicy' not allowed"),
        ('{"networkPolicy": {"callers": []}}', "minItems: got 0, want 1"),
        ('{"autoscaling": {"keda": {"kvUsage": 80}}}', "maximum: got 80, want 1"),
        ('{"autoscaling": {"hpa": {"enabled": true}, "keda": {"enabled": true}}}', "enable hpa or keda, not both"),
        ('{"autoscaling": {"keda": {"enabled": true}}}', "set prometheusAddress"),
        ('{"llmd": {"inferencePool": {"enabled": true}}}', "set http.enabled too"),
        ('{"tls": {"clientCA": true}}', "set tls.secret too"),
        (
            '{"apiKeys": {"secret": "k"}, "shutdown": {"preStop": {"enabled": true}}}',
            "a key with the right admin; set operatorKey.secret",
        ),
        ('{"ports": {"metrics": 50052}}', "need different ports"),
        ('{"modelCache": {"existingClaim": "x", "persistence": {"enabled": true}}}', "not both"),
    ],
)
def test_wrong_values_are_refused_with_the_reason(helm: Helm, tmp_path: Path, values: str, message: str) -> None:
    (tmp_path / "values.yaml").write_text(values)
    done = helm("template", "penstock", CHART, "-f", tmp_path / "values.yaml")
    assert done.returncode != 0
    assert message in done.stderr


# ------------------------------------------------------------------------------------------------------------ the pods


@pytest.mark.parametrize("example", RENDERED)
def test_pods_run_without_rights(render: Render, example: str | None) -> None:
    spec = pod(render(example))
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in spec["containers"]:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("example", RENDERED)
def test_mounts_volumes_and_ports_fit_together(render: Render, example: str | None) -> None:
    manifests = render(example)
    spec, claims = pod(manifests), volume_claims(manifests)
    volumes = {each["name"] for each in spec["volumes"]} | {each["metadata"]["name"] for each in claims}
    mounted = [(mount["name"], mount["mountPath"]) for each in spec["containers"] for mount in each["volumeMounts"]]
    assert {name for name, _ in mounted} == volumes
    variables = environment(container(manifests))
    paths = [Path(value) for name, value in variables.items() if value.startswith("/") and name != "PATH"]
    assert paths
    assert all(any(path.is_relative_to(mount) for _, mount in mounted) for path in paths)
    ports = {port["name"] for each in spec["containers"] for port in each["ports"]}
    for service in (each for each in manifests if each["kind"] == "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        assert service["spec"]["selector"].items() <= pod_template(manifests)["metadata"]["labels"].items()


@pytest.mark.parametrize("example", RENDERED)
def test_a_pod_has_time_for_everything_that_its_end_takes(render: Render, example: str | None) -> None:
    manifests = render(example)
    serve = container(manifests)
    variables = environment(serve)
    needed = float(variables["PENSTOCK_SERVE_DRAIN_DELAY"]) + float(variables["PENSTOCK_SERVE_SHUTDOWN_GRACE"])
    if "lifecycle" in serve:
        script = serve["lifecycle"]["preStop"]["exec"]["command"][-1]
        needed += sum(map(int, re.findall(r"(?:sleep|timeout) (\d+)", script)))
    assert pod(manifests)["terminationGracePeriodSeconds"] > needed


def test_the_metrics_port_is_open_only_to_the_monitoring_namespace(render: Render) -> None:
    policy = find(render("full"), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    sources = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    assert sources.keys() == {"grpc", "http", "metrics"}
    assert sources["metrics"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert len([rule for rule in policy["ingress"] if {"port": "metrics", "protocol": "TCP"} in rule["ports"]]) == 1


def test_gpus_are_limits_and_shared_by_ranks(render: Render) -> None:
    serve = container(render("gpu", **{"gpu.count": 2}))
    assert serve["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert parse_config([], environment(serve)).tensor_parallel_size == 2
    assert "nvidia.com/gpu" not in container(render("cpu"))["resources"]["limits"]


def test_a_pools_pods_have_its_labels(render: Render) -> None:
    manifests = render("gpu")
    selected = find(manifests, "InferencePool")["spec"]["selector"]["matchLabels"]
    labels = pod_template(manifests)["metadata"]["labels"]
    assert selected["llm-d.ai/inferenceServing"] == "true"
    assert selected["llm-d.ai/engine-type"] == "vllm"
    assert selected.items() <= labels.items()
    number = find(manifests, "InferencePool")["spec"]["targetPorts"][0]["number"]
    assert str(number) == environment(container(manifests))["PENSTOCK_SERVE_HTTP_PORT"]


def test_pods_with_tls_are_probed_over_http_and_others_over_grpc(render: Render) -> None:
    plain, secured = container(render("cpu")), container(render("full"))
    assert plain["livenessProbe"]["grpc"] == {"port": 50051, "service": LIVENESS}
    assert plain["readinessProbe"]["grpc"] == {"port": 50051}
    for probe, path in (("livenessProbe", LIVE_PATH), ("readinessProbe", READY_PATH), ("startupProbe", READY_PATH)):
        assert secured[probe]["httpGet"] == {"path": path, "port": "metrics"}
