"""Reads what helm renders as Kubernetes does: the pods of a workload, and the variables of a container."""

import re
from pathlib import Path
from typing import Any

from penstock.service.config.command_line import PREFIX

Manifest = dict[str, Any]

WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")
LEADER, WORKER = "leader", "worker"
_REFERENCE = re.compile(r"\$(?:\$|\((\w+)\))")


def find(manifests: list[Manifest], *kinds: str) -> Manifest:
    (found,) = (each for each in manifests if each["kind"] in kinds)
    return found


def pod_template(manifests: list[Manifest], role: str = LEADER) -> Manifest:
    """Returns the template of the pods that serve, or of a LeaderWorkerSet's workers."""
    workload = find(manifests, *WORKLOADS)
    if workload["kind"] == "LeaderWorkerSet":
        return dict(workload["spec"]["leaderWorkerTemplate"][f"{role}Template"])
    assert role == LEADER, "other workloads have no workers"
    return dict(workload["spec"]["template"])


def pod(manifests: list[Manifest], role: str = LEADER) -> Manifest:
    return dict(pod_template(manifests, role)["spec"])


def volume_claims(manifests: list[Manifest]) -> list[Manifest]:
    spec = find(manifests, *WORKLOADS)["spec"]
    return list(spec.get("leaderWorkerTemplate", spec).get("volumeClaimTemplates", []))


def container(manifests: list[Manifest], name: str = "penstock", role: str = LEADER) -> Manifest:
    """Returns a container of the first pod with this role. In a LeaderWorkerSet, the variables of the controller are
    before its own."""
    found = next(each for each in pod(manifests, role)["containers"] if each["name"] == name)
    workload = find(manifests, *WORKLOADS)
    if workload["kind"] != "LeaderWorkerSet":
        return dict(found)
    group = workload["metadata"]["name"]
    variables = {
        "LWS_LEADER_ADDRESS": f"{group}-0.{group}.llm",
        "LWS_GROUP_SIZE": str(workload["spec"]["leaderWorkerTemplate"]["size"]),
        "LWS_WORKER_INDEX": "0" if role == LEADER else "1",
    }
    first = [{"name": name, "value": value} for name, value in variables.items()]
    return dict(found, env=[*first, *found["env"]])


def environment(of: Manifest, **given: str) -> dict[str, str]:
    """Returns a container's variables, those of Secrets left out. ``given`` are values that the cluster chooses; an
    address of the pod is there anyway."""
    values = {"POD_IP": "10.1.2.3"} | given
    for entry in of["env"]:
        if "value" in entry and entry["name"] not in given:
            values[entry["name"]] = expand(entry["value"], values)
    return values


def expand(text: str, values: dict[str, str]) -> str:
    """Replaces $(NAME), as Kubernetes does; $$ stands for one $. Raises KeyError where Kubernetes would leave a name
    that no variable before it has."""
    return _REFERENCE.sub(lambda match: "$" if match[1] is None else values[match[1]], text)


def on_this_machine(values: dict[str, str], directory: Path) -> dict[str, str]:
    """Returns a container's variables for a process outside a cluster: with free ports, and with folders in
    ``directory`` in place of volumes."""
    values = {name: text.replace("/etc/penstock", f"{directory}/etc") for name, text in values.items()}
    values |= {name: str(directory) for name in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME")}
    values |= {name: "0" for name in (f"{PREFIX}PORT", f"{PREFIX}HTTP_PORT") if name in values}
    for name in (f"{PREFIX}ADMIN_LISTEN", f"{PREFIX}METRICS_LISTEN"):
        if name in values:
            values[name] = re.sub(r":\d+$", ":0", values[name])
    return values | {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
