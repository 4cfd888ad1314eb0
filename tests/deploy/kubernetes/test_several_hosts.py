"""The chart with several hosts: a LeaderWorkerSet whose leaders serve, and whose workers join them."""

import base64
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cluster.manifests import (
    LEADER,
    WORKER,
    Manifest,
    container,
    environment,
    expand,
    find,
    pod,
    pod_template,
    volume_claims,
)
from jsonschema import Draft202012Validator, ValidationError

from penstock.models.executor.join.token import MIN_TOKEN_BYTES
from penstock.service.config.command_line import parse_config
from penstock.service.config.host_flags import DEFAULT_PORT
from penstock.service.hosts.command import make_parser

CHART = Path(__file__).parents[3] / "deploy/helm/penstock"
CUSTOM = json.loads(Path(__file__).with_name("custom_resources.json").read_text())
LWS = "leaderworkerset.x-k8s.io/v1"
TWO_HOSTS = {"hosts": {"size": 2}}
EVERYTHING: dict[str, Any] = {
    "hosts": {
        "size": 2,
        "token": {"secret": "our-token", "key": "join"},
        "tls": {"secret": "join-certificates"},
        "workerArgs": ["--threads=3"],
        "exclusiveTopology": "example.com/rack",
    },
    "flags": {"tensor-parallel-size": 8, "log-format": "json", "log-level": "debug", "max-num-seqs": 4},
    "gpu": {"count": 4},
    "shm": {"sizeLimit": "1Gi"},
    "model": {"name": "/weights", "offline": True},
    "hfToken": {"secret": "hugging-face"},
    "modelCache": {"persistence": {"enabled": True, "storageClass": "fast"}},
    "tls": {"secret": "tls"},
    "apiKeys": {"content": "sha256:00 tenant\n"},
    "tenants": {"content": {"default": {}}},
    "http": {"enabled": True},
    "nodeSelector": {"pool": "large"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "serviceAccount": {"name": "penstock"},
    "labels": {"team": "search"},
    "podLabels": {"tier": "gold"},
    "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "extraVolumes": [{"name": "weights", "hostPath": {"path": "/weights"}}],
    "extraVolumeMounts": [{"name": "weights", "mountPath": "/weights", "readOnly": True}],
    "networkPolicy": {"enabled": True, "egress": [{"ports": [{"port": 53, "protocol": "UDP"}]}]},
}

Render = Callable[..., list[Manifest]]
Helm = Callable[..., subprocess.CompletedProcess[str]]


def spec_of(manifests: list[Manifest]) -> Manifest:
    return dict(find(manifests, "LeaderWorkerSet")["spec"])


def labels_of(manifests: list[Manifest], role: str) -> dict[str, str]:
    return dict(pod_template(manifests, role)["metadata"]["labels"])


def worker_arguments(manifests: list[Manifest]) -> Any:
    """What ``penstock worker`` makes of its command line."""
    worker = container(manifests, role=WORKER)
    assert worker["command"] == ["penstock", "worker"]
    variables = environment(worker)
    return make_parser().parse_args([expand(each, variables) for each in worker["args"]])


# ----------------------------------------------------------------------------------------------------------- validity


def test_the_leaderworkerset_has_known_fields(render: Render) -> None:
    schema = Draft202012Validator(CUSTOM[f"{LWS} LeaderWorkerSet"])
    spec = spec_of(render(**EVERYTHING))
    schema.validate(spec)
    template = spec["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"], spec["startupPolicy"]) == (2, "None", "LeaderCreated")
    with pytest.raises(ValidationError, match="restartPolicy"):
        schema.validate({"restartPolicy": "None"} | spec)
    no_progress = {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxSurge": 0, "maxUnavailable": 0}}
    with pytest.raises(ValidationError, match="maxUnavailable"):
        schema.validate(spec | {"rolloutStrategy": no_progress})


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_its_pods_and_volumes_are_valid(render: Render, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    manifests = render(**EVERYTHING)
    for role in (LEADER, WORKER):
        template = pod_template(manifests, role)
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"} | template["metadata"]}
        validate(whole | {"spec": template["spec"]}, version, strict=True)
    (claim,) = volume_claims(manifests)
    assert claim["spec"]["storageClassName"] == "fast"
    validate(claim, version, strict=True)
    for each in manifests:
        if f"{each['apiVersion']} {each['kind']}" not in CUSTOM:
            validate(each, version, strict=True)


def test_names_leave_room_for_those_of_the_controller(render: Render) -> None:
    manifests = render(fullnameOverride="a" * 42, **TWO_HOSTS)
    name = find(manifests, "LeaderWorkerSet")["metadata"]["name"]
    assert len(f"{name}-999-0123456789") <= 63, "the label with the revision of a group's workers"
    services = {each["metadata"]["name"] for each in manifests if each["kind"] == "Service"}
    assert name not in services, "the controller makes a Service of this name"


# ------------------------------------------------------------------------------------------------------------ the pods


def test_workers_run_where_leaders_run(render: Render) -> None:
    manifests = render(**EVERYTHING)
    leader, worker = pod(manifests, LEADER), pod(manifests, WORKER)
    other = {"containers", "volumes", "terminationGracePeriodSeconds"}
    assert {key: value for key, value in leader.items() if key not in other} == {
        key: value for key, value in worker.items() if key not in other
    }
    assert worker["nodeSelector"] == {"pool": "large"}
    serve, join = container(manifests), container(manifests, role=WORKER)
    for key in ("image", "resources", "securityContext"):
        assert serve[key] == join[key]
    assert join["resources"]["limits"]["nvidia.com/gpu"] == 4
    variables = environment(join)
    assert {"HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"} <= variables.keys()
    assert variables["NCCL_DEBUG"] == "WARN"
    assert [each["name"] for each in join["env"] if "valueFrom" in each] == ["POD_IP", "HF_TOKEN"]
    assert not [name for name in variables if name.startswith("PENSTOCK_")]


def test_workers_have_nothing_of_what_leaders_serve(render: Render) -> None:
    manifests = render(**EVERYTHING)
    join = container(manifests, role=WORKER)
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} & join.keys()
    mounts = {each["mountPath"] for each in join["volumeMounts"]}
    assert {each for each in mounts if each.startswith("/etc")} == {"/etc/penstock/join", "/etc/penstock/join-tls"}
    assert mounts > {"/tmp", "/cache", "/models", "/dev/shm", "/weights"}
    volumes = {each["name"] for each in pod(manifests, WORKER)["volumes"]}
    assert {each["name"] for each in join["volumeMounts"]} == volumes | {"models"}
    leaders = {each["mountPath"] for each in container(manifests)["volumeMounts"]}
    assert leaders - mounts == {"/etc/penstock/tls", "/etc/penstock/keys", "/etc/penstock/tenants"}


def test_only_leaders_get_requests(render: Render) -> None:
    pool = {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}
    manifests = render(http={"enabled": True}, llmd=pool, networkPolicy={"enabled": True}, **TWO_HOSTS)
    leader, worker = labels_of(manifests, LEADER), labels_of(manifests, WORKER)
    services = [each["spec"]["selector"] for each in manifests if each["kind"] == "Service"]
    for selector in (*services, find(manifests, "InferencePool")["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= leader.items()
        assert selector["app.kubernetes.io/component"] != worker["app.kubernetes.io/component"]
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        selector = find(manifests, kind)["spec"][key]["matchLabels"]
        assert selector.items() <= leader.items() & worker.items()


def test_only_pods_of_the_release_reach_the_ports_of_a_group(render: Render) -> None:
    manifests = render(**EVERYTHING)
    policy = find(manifests, "NetworkPolicy")["spec"]
    named = {each["name"]: each["containerPort"] for each in container(manifests)["ports"]}
    assert named["join"] == DEFAULT_PORT
    own = {"podSelector": policy["podSelector"]}
    (ours,) = (rule for rule in policy["ingress"] if rule["from"] == [own])
    assert "ports" not in ours, "Gloo, NCCL and the stages choose ports"
    for rule in policy["ingress"]:
        assert rule is ours or {each["port"] for each in rule["ports"]} <= {"grpc", "http", "metrics"}
    assert {"to": [own]} in policy["egress"]


def test_autoscalers_scale_groups(render: Render) -> None:
    keda = {"enabled": True, "prometheusAddress": "http://prometheus:9090"}
    for kind, values in (("HorizontalPodAutoscaler", {"hpa": {"enabled": True}}), ("ScaledObject", {"keda": keda})):
        manifests = render(autoscaling=values, **TWO_HOSTS)
        workload = find(manifests, "LeaderWorkerSet")
        target = {"apiVersion": LWS, "kind": "LeaderWorkerSet", "name": workload["metadata"]["name"]}
        assert find(manifests, kind)["spec"]["scaleTargetRef"] == target
        assert "replicas" not in workload["spec"]


# ------------------------------------------------------------------------------------------------------ command lines


@pytest.mark.parametrize(
    ("values", "tensor", "pipeline"),
    [
        ({}, 1, 2),
        ({"flags": {"tensor-parallel-size": 2}}, 2, 1),
        ({"flags": {"pipeline-parallel-size": 4}}, 1, 4),
        ({"flags": {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}}, 2, 2),
        ({"gpu": {"count": 4}}, 4, 2),
        ({"gpu": {"count": 4}, "flags": {"tensor-parallel-size": 8}}, 8, 1),
        ({"gpu": {"count": 4}, "flags": {"tensor-parallel-size": 2}}, 2, 4),
    ],
)
def test_ranks_fill_the_hosts(render: Render, values: dict[str, Any], tensor: int, pipeline: int) -> None:
    config = parse_config([], environment(container(render(**values, **TWO_HOSTS))))
    assert (config.nnodes, config.node_rank) == (2, 0)
    assert (config.tensor_parallel_size, config.pipeline_parallel_size) == (tensor, pipeline)
    assert config.join_timeout == 1800, "as long as the startup probe"


def test_both_command_lines_join_at_the_same_port_with_the_same_files(render: Render) -> None:
    manifests = render(**EVERYTHING)
    worker, config = worker_arguments(manifests), parse_config([], environment(container(manifests)))
    assert (str(worker.join.host), worker.join.port) == ("penstock-hosts-0.penstock-hosts.llm", config.master_port)
    assert (worker.node_rank, worker.threads) == (1, 3)
    assert (worker.log_format, worker.log_level) == (config.log_format, config.log_level) == ("json", "debug")
    mounts = [each["mountPath"] for each in container(manifests, role=WORKER)["volumeMounts"]]
    for name in ("join_token_file", "join_tls_ca", "join_tls_cert", "join_tls_key"):
        path = getattr(worker, name)
        assert path == getattr(config, name)
        assert str(path.parent) in mounts
    (token,) = (each["secret"] for each in pod(manifests, WORKER)["volumes"] if each["name"] == "join")
    assert (token["secretName"], token["items"]) == ("our-token", [{"key": "join", "path": "token"}])
    assert token["defaultMode"] == 0o440, "the group is that of the container's user"
    assert "our-token" not in {each["metadata"]["name"] for each in manifests if each["kind"] == "Secret"}


def test_a_group_may_have_a_rack_for_itself(render: Render) -> None:
    annotations = find(render(**EVERYTHING), "LeaderWorkerSet")["metadata"]["annotations"]
    assert annotations == {"leaderworkerset.sigs.k8s.io/exclusive-topology": "example.com/rack"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hosts": {"size": 0}}, "'/hosts/size': minimum: got 0, want 1"),
        ({"hosts": {"size": 2}, "flags": {"nnodes": 3}}, "additional properties 'nnodes' not allowed"),
        (
            {
                "hosts": {"size": 2},
                "gpu": {"count": 4},
                "flags": {"tensor-parallel-size": 4, "pipeline-parallel-size": 1},
            },
            "so that their product is 8",
        ),
        ({"hosts": {"size": 3}, "flags": {"pipeline-parallel-size": 4}}, "so that 3 divides their product"),
        ({"hosts": {"size": 2}, "strategy": {"type": "Recreate"}}, "strategy.type: a LeaderWorkerSet has only Rolling"),
        (
            {"hosts": {"size": 2}, "modelCache": {"persistence": {"enabled": True, "annotations": {"a": "b"}}}},
            "modelCache.persistence.annotations: a LeaderWorkerSet drops them",
        ),
        (
            {"hosts": {"size": 2}, "podDisruptionBudget": {"maxUnavailable": "25%"}},
            "podDisruptionBudget.maxUnavailable: a percentage counts pods, not groups",
        ),
        ({"hosts": {"size": 2, "port": 50053}}, "need different ports"),
        ({"hosts": {"size": 2}, "fullnameOverride": "a" * 43}, "set one of at most 42 characters"),
        ({"flags": {"join-allow": "10.0.0.0/8"}}, "flags.join-allow: is for several hosts; set hosts.size"),
    ],
)
def test_values_that_cannot_work_are_refused(helm: Helm, tmp_path: Path, values: Any, message: str) -> None:
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    done = helm("template", "penstock", CHART, "-f", tmp_path / "values.yaml")
    assert done.returncode != 0
    assert len([line for line in done.stderr.splitlines() if message in line]) == 1


def test_the_notes_name_pods_that_exist(helm: Helm) -> None:
    done = helm("install", "penstock", CHART, "-n", "llm", "--dry-run=client", "--set", "hosts.size=2")
    notes = done.stdout.partition("NOTES:")[2]
    assert "wait leaderworkerset/penstock-hosts --for=condition=Available" in notes
    assert "exec -it pod/penstock-hosts-0 -- penstock top" in notes
    assert "enable networkPolicy" in notes


# ----------------------------------------------------------------------------------------------------------- the token


def token_of(manifests: list[Manifest]) -> bytes:
    secret = find(manifests, "Secret")
    assert secret["metadata"]["name"] == "penstock-join"
    return base64.b64decode(secret["data"]["token"])


def test_each_release_gets_a_token_of_its_own(render: Render) -> None:
    tokens = [token_of(render(**TWO_HOSTS)) for _ in range(2)]
    assert tokens[0] != tokens[1]
    assert all(len(token) >= MIN_TOKEN_BYTES for token in tokens)


@contextmanager
def api_server(manifests: list[Manifest], found: Manifest) -> Iterator[str]:
    """Yields the URL of what stands for Kubernetes: it knows the kinds of the manifests, and has one object."""
    kinds = {(each["apiVersion"], each["kind"]) for each in manifests}
    groups = [version for version in sorted({version for version, _ in kinds}) if "/" in version]
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": group.partition("/")[0],
                    "versions": [{"groupVersion": group, "version": group.partition("/")[2]}],
                    "preferredVersion": {"groupVersion": group, "version": group.partition("/")[2]},
                }
                for group in groups
            ],
        },
        f"/api/v1/namespaces/llm/secrets/{found['metadata']['name']}": found,
    }
    for version in {version for version, _ in kinds}:
        names = [kind for of, kind in kinds if of == version]
        answers[f"/{'apis' if '/' in version else 'api'}/{version}"] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {"name": f"{name.lower()}s", "singularName": "", "namespaced": True, "kind": name, "verbs": ["get"]}
                for name in names
            ],
        }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(answer or missing).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def test_an_upgrade_keeps_the_token(render: Render, helm: Helm, tmp_path: Path) -> None:
    manifests = render(**TWO_HOSTS)
    found = find(manifests, "Secret")
    owner = {"meta.helm.sh/release-name": "penstock", "meta.helm.sh/release-namespace": "llm"}
    found = found | {"metadata": found["metadata"] | {"namespace": "llm", "annotations": owner}}
    with api_server(manifests, found) as url:
        cluster = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url)
        done = helm("template", "penstock", CHART, "-n", "llm", "--set", "hosts.size=2", *cluster)
    assert done.returncode == 0, done.stderr
    assert f"token: {found['data']['token']}" in done.stdout
