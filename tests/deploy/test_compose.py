"""compose.yaml and what it mounts: flags and ports exist, everything is on loopback and sandboxed, times fit."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring.prometheus_server import skip_without

from penstock.clients.gateway.server.flags import make_parser
from penstock.service.app.prepare import _HTTP_GRACE_S
from penstock.service.config.addresses import Address
from penstock.service.config.command_line import PREFIX, parse_config
from penstock.service.config.flags import ConfigError
from penstock.service.config.serve_config import ServeConfig
from penstock.service.transport.transport import _IDLE_CONNECTION_MS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/docker"
PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ENVOY = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text(encoding="utf-8"))
DEFAULTS = re.compile(r"\$\{\w+:-([^}]*)\}")


def variables() -> dict[str, str]:
    """The service's environment, with the defaults of what the caller may set."""
    return {name: DEFAULTS.sub(r"\1", value) for name, value in SERVICES["penstock"]["environment"].items()}


def serve_config() -> ServeConfig:
    return parse_config([], variables())


def gateway_flags() -> Any:
    word, *flags = SERVICES["gateway"]["command"]
    assert word == "gateway"
    return make_parser().parse_args(flags)


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def mounts(service: str) -> dict[str, str]:
    """The files and volumes of a service, by where it sees them."""
    split = (volume.split(":") for volume in SERVICES[service].get("volumes", ()))
    return {parts[1]: parts[0] for parts in split}


# -------------------------------------------------------------------------------------------------------------- compose


def test_every_variable_of_the_service_names_a_flag() -> None:
    assert all(name.startswith(PREFIX) for name in variables())
    with pytest.raises(ConfigError, match="PENSTOCK_SERVE_PROT"):
        parse_config([], {**variables(), f"{PREFIX}PROT": "1"})


def test_every_service_is_sandboxed_and_restarted() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert "privileged" not in service, name


def test_ports_are_published_on_loopback_only() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == {"envoy", "gateway", "prometheus", "grafana"}
    for ports in published.values():
        for port in ports:
            assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)


def test_every_service_has_a_health_check() -> None:
    """That of the service itself is in its image, which the gateway must override."""
    assert [name for name, service in SERVICES.items() if "healthcheck" not in service] == ["penstock"]
    waits = [each["condition"] for service in SERVICES.values() for each in service.get("depends_on", {}).values()]
    assert set(waits) == {"service_healthy"}


def test_images_have_versions() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    for name, service in SERVICES.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", DEFAULTS.sub(r"\1", service["image"])), name
    assert DEFAULTS.sub(r"\1", SERVICES["penstock"]["image"]) == f"penstock:{version}"
    assert SERVICES["gateway"]["image"] == SERVICES["penstock"]["image"]


def test_what_is_mounted_exists() -> None:
    for name in SERVICES:
        for inside, source in mounts(name).items():
            if source.startswith("."):
                assert (FOLDER / source).exists(), (name, source)
            else:
                assert source in COMPOSE["volumes"], (name, inside)
    build = SERVICES["penstock"]["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).exists()


def test_secrets_are_files_that_git_and_builds_ignore() -> None:
    used = {name for service in SERVICES.values() for name in service.get("secrets", ())}
    assert used == COMPOSE["secrets"].keys()
    for secret in COMPOSE["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    assert "deploy/docker/secrets/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert str(serve_config().api_keys_file) == "/run/secrets/api_keys"
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_password"


def test_services_have_time_to_stop() -> None:
    config, gateway = serve_config(), gateway_flags()
    needed = config.drain_delay + config.shutdown_grace + _HTTP_GRACE_S
    assert seconds(SERVICES["penstock"]["stop_grace_period"]) > needed
    assert seconds(SERVICES["gateway"]["stop_grace_period"]) > gateway.shutdown_grace


def test_docker_compose_accepts_the_file_and_no_other_key(find_program: Callable[[str], str], tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((FOLDER / "compose.yaml").read_text().replace("restart:", "restarts:"))
    statuses = []
    for file in (FOLDER / "compose.yaml", wrong):
        command = [find_program("docker-compose"), "--file", str(file), "config", "--quiet"]
        statuses.append(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False))
    assert [done.returncode == 0 for done in statuses] == [True, False], statuses
    assert "restarts" in statuses[1].stderr


# ---------------------------------------------------------------------------------------------------------------- Envoy


def manager() -> dict[str, Any]:
    (listener,) = ENVOY["static_resources"]["listeners"]
    return dict(listener["filter_chains"][0]["filters"][0]["typed_config"])


def cluster() -> dict[str, Any]:
    (found,) = ENVOY["static_resources"]["clusters"]
    return dict(found)


def address_of(owner: dict[str, Any]) -> tuple[str, int]:
    socket = owner["address"]["socket_address"]
    return socket["address"], socket["port_value"]


def test_calls_go_through_envoy_to_the_service() -> None:
    _, port = address_of(ENVOY["static_resources"]["listeners"][0])
    assert SERVICES["envoy"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert gateway_flags().target == f"envoy:{port}"
    (endpoints,) = cluster()["load_assignment"]["endpoints"]
    (endpoint,) = endpoints["lb_endpoints"]
    config = serve_config()
    assert config.host == "0.0.0.0"
    assert address_of(endpoint["endpoint"]) == ("penstock", config.port or 50051)
    assert f"/127.0.0.1/{address_of(ENVOY['admin'])[1]} " in SERVICES["envoy"]["healthcheck"]["test"][-1]


def test_envoy_notices_a_service_that_stops_before_it_refuses_calls() -> None:
    (check,) = cluster()["health_checks"]
    slowest = max(seconds(check["interval"]), seconds(check["no_traffic_interval"])) + seconds(check["timeout"])
    assert slowest * check["unhealthy_threshold"] < serve_config().drain_delay


def test_envoys_limits_are_those_of_the_service() -> None:
    config = ServeConfig()
    streams = manager()["http2_protocol_options"]["max_concurrent_streams"]
    assert streams == config.max_num_seqs + config.max_queued_requests
    (monitor,) = ENVOY["overload_manager"]["resource_monitors"]
    assert monitor["typed_config"]["max_active_downstream_connections"] == config.max_connections
    options = cluster()["typed_extension_protocol_options"]
    (upstream,) = options.values()
    assert seconds(upstream["common_http_protocol_options"]["idle_timeout"]) * 1000 < _IDLE_CONNECTION_MS


# ----------------------------------------------------------------------------------------------- Prometheus and Grafana


def jobs(file: Path) -> dict[str, dict[str, Any]]:
    """The jobs by name, without their targets."""
    found = yaml.safe_load(file.read_text(encoding="utf-8"))["scrape_configs"]
    return {
        job.pop("job_name"): {
            key: value for key, value in job.items() if not key.endswith("_configs") or "relabel" in key
        }
        for job in found
    }


def test_prometheus_has_the_example_with_other_targets() -> None:
    own, example = (
        yaml.safe_load(path.read_text()) for path in (FOLDER / "prometheus.yml", PROMETHEUS / "prometheus.yml")
    )
    assert jobs(FOLDER / "prometheus.yml") == jobs(PROMETHEUS / "prometheus.yml")
    assert {key: own[key] for key in ("global", "rule_files")} == {
        key: example[key] for key in ("global", "rule_files")
    }


def test_prometheus_scrapes_the_listeners() -> None:
    service, gateway = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    (names,) = service["dns_sd_configs"]
    listens = Address.parse(serve_config().metrics_listen or "")
    assert (names["names"], names["port"]) == (["penstock"], listens.port)
    assert not listens.is_local
    assert gateway["static_configs"] == [{"targets": [f"gateway:{gateway_flags().port}"]}]


@skip_without("promtool")
def test_promtool_accepts_the_files_as_they_are_mounted(tmp_path: Path) -> None:
    for inside, source in mounts("prometheus").items():
        if source.startswith("."):
            shutil.copy(FOLDER / source, tmp_path / Path(inside).name)
    command = ["promtool", "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    seen = mounts("grafana")
    assert seen["/etc/grafana/provisioning"] == "../grafana/provisioning"
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    (port,) = SERVICES["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{port.rpartition(':')[2]}"
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/penstock.yaml").read_text())["providers"]
    dashboard = f"{provider['options']['path']}/penstock.json"
    assert seen[dashboard] == "../grafana/penstock.json"
    assert SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    dashboard_variables = json.loads((GRAFANA / "penstock.json").read_text())["templating"]["list"]
    assert [each["query"] for each in dashboard_variables if each["name"] == "datasource"] == [source["type"]]
