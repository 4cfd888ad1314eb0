"""The alerts and the dashboard of ``deploy/``: they use metrics that exist, each alert has a section in docs/alerts.md
and a case in which it fires, and Prometheus accepts every query and has data for it."""

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from monitoring.prometheus_server import Prometheus, running_prometheus, skip_without, until
from monitoring.promql import names_in
from prometheus_client import ProcessCollector
from serve_process import http_target_of, serving, target_of

import penstock.v1 as pb
from penstock.clients import Client, RequestFailed
from penstock.clients.gateway.schemas.unknown_fields import IgnoredFields
from penstock.clients.gateway.traffic import GatewayMetrics
from penstock.service.telemetry.catalog import INSTRUMENTS
from penstock.service.telemetry.instrument import MetricKind
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARD = json.loads((ROOT / "deploy/grafana/penstock.json").read_text(encoding="utf-8"))
RUNBOOK = (ROOT / "docs/alerts.md").read_text(encoding="utf-8")


def read_yaml(name: str) -> Any:
    return yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))


RULES: dict[str, Any] = {rule["alert"]: rule for group in read_yaml("alerts.yml")["groups"] for rule in group["rules"]}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
TARGETS = {(panel["title"], target["refId"]): target for panel in PANELS for target in panel["targets"]}
QUERIES = {alert: str(rule["expr"]) for alert, rule in RULES.items()} | {
    f"{title} {ref}": str(target["expr"]) for (title, ref), target in TARGETS.items()
}
SCRAPED = {"job", "instance"}
"""The labels that Prometheus adds to every sample."""


# ------------------------------------------------------------------------------------------------- names of metrics


def series() -> dict[str, set[str]]:
    """The labels of every time series that Prometheus can have, by its name."""
    found: dict[str, set[str]] = {"up": set()}

    def add(name: str, labels: set[str], is_histogram: bool) -> None:
        if is_histogram:
            found.update({f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels})
        else:
            found[name] = labels

    for each in INSTRUMENTS:
        labels = {label.replace(".", "_") for label in each.labels}
        add(each.prometheus_name, labels, each.kind is MetricKind.HISTOGRAM)
    gateway = GatewayMetrics()
    IgnoredFields(gateway.registry)
    for collector in gateway.registry._collector_to_names:
        metric: Any = collector
        name = metric._name + ("_total" if metric._type == "counter" else "")
        add(name, set(metric._labelnames), metric._type == "histogram")
    for family in ProcessCollector(registry=None).collect():
        found |= {sample.name: set() for sample in family.samples}
    return found


SERIES = series()


def unknown(expression: str) -> list[str]:
    """The metrics of an expression that do not exist, and labels that none of its metrics has."""
    names = names_in(expression)
    wrong = [each.metric for each in names.selectors if each.metric not in SERIES]
    known = [each for each in names.selectors if each.metric in SERIES]
    wrong += [
        f"{each.metric}{{{label}}}" for each in known for label in sorted(each.labels - SERIES[each.metric] - SCRAPED)
    ]
    return wrong + sorted(names.grouping - labels_of(expression))


def labels_of(expression: str) -> set[str]:
    """The labels that the result may have."""
    return SCRAPED.union(*(SERIES.get(each.metric, ()) for each in names_in(expression).selectors))


@pytest.mark.parametrize("query", QUERIES)
def test_metrics_and_labels_of_a_query_exist(query: str) -> None:
    assert names_in(QUERIES[query]).selectors != []
    assert unknown(QUERIES[query]) == []


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(penstock_steps_total[5m]) and on (instance) up", []),
        ("rate(penstock_steps[5m])", ["penstock_steps"]),
        ("penstock_inter_token_latency_seconds", ["penstock_inter_token_latency_seconds"]),
        ("sum by (le) (rate(penstock_inter_token_latency_seconds_bucket[1d] offset 1h)) > 0.5", []),
        ("sum by (le) (rate(penstock_inter_token_latency_seconds_sum[5m]))", ["le"]),
        ('penstock_state{state="serving", reason!~"a}b"} == 1', ["penstock_state{reason}"]),
        ('vllm:num_requests_running{model_name=~"$model_name"} / penstock_rows', ["penstock_rows"]),
        (
            "penstock_gateway_live_requests + penstock_gateway_live_requests_total",
            ["penstock_gateway_live_requests_total"],
        ),
        ("process_open_fds unless ignoring (tenant) process_open_files", ["process_open_files", "tenant"]),
    ],
)
def test_a_wrong_name_is_found(expression: str, wrong: list[str]) -> None:
    assert unknown(expression) == wrong


def test_labels_in_texts_exist() -> None:
    texts = {name: (str(rule["annotations"]), str(rule["expr"])) for name, rule in RULES.items()}
    texts |= {f"{title} {ref}": (each["legendFormat"], each["expr"]) for (title, ref), each in TARGETS.items()}
    wrong = {
        name: missing
        for name, (text, expression) in texts.items()
        if (missing := set(re.findall(r"\$labels\.(\w+)|\{\{(\w+)\}\}", text)) - pairs(labels_of(expression)))
    }
    assert wrong == {}


def pairs(labels: set[str]) -> set[tuple[str, str]]:
    """Each label as either of the two groups of a match."""
    return {pair for label in labels for pair in ((label, ""), ("", label))}


# ----------------------------------------------------------------------------------------------------------- alerts


def test_every_alert_is_whole() -> None:
    for name, rule in RULES.items():
        assert rule["labels"]["severity"] in {"critical", "warning"}, name
        assert re.fullmatch(r"\d+[mh]", rule["for"]), name
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}, name
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"


def test_every_alert_has_a_section() -> None:
    assert re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE) == list(RULES)
    sections = re.split(r"^### \w+$", RUNBOOK, flags=re.MULTILINE)[1:]
    assert [
        name for name, text in zip(RULES, sections, strict=True) if "Look at" not in text or "Do:" not in text
    ] == []


def test_every_alert_has_a_case_in_which_it_fires_and_is_quiet_in_the_healthy_one() -> None:
    healthy, *others = read_yaml("alerts_test.yml")["tests"]
    checks = [check for case in others for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == RULES.keys()
    assert {check["alertname"] for check in healthy["alert_rule_test"]} == RULES.keys()
    assert not any(check.get("exp_alerts") for check in healthy["alert_rule_test"])


def test_the_healthy_case_has_every_metric_of_the_alerts() -> None:
    healthy = read_yaml("alerts_test.yml")["tests"][0]
    given = {str(each["series"]).partition("{")[0] for each in healthy["input_series"]}
    used = {each.metric for rule in RULES.values() for each in names_in(rule["expr"]).selectors}
    assert given == used


def test_the_cases_have_series_that_exist() -> None:
    cases = read_yaml("alerts_test.yml")["tests"]
    given = {each["series"] for case in cases for each in case["input_series"]}
    assert {each: wrong for each in given if (wrong := unknown(each))} == {}


def test_the_jobs_are_those_of_the_example() -> None:
    jobs = {job["job_name"] for job in read_yaml("prometheus.yml")["scrape_configs"]}
    matchers = re.findall(r'job=~?"([^"]+)"', " ".join(QUERIES.values()))
    assert {name for names in matchers for name in names.split("|")} == jobs


@skip_without("promtool")
@pytest.mark.parametrize(
    "command",
    ["check rules --lint=all --lint-fatal alerts.yml", "check config prometheus.yml", "test rules alerts_test.yml"],
)
def test_promtool_accepts(command: str) -> None:
    done = subprocess.run(
        ["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------- dashboard


def test_every_panel_is_whole() -> None:
    for panel in PANELS:
        title = panel["title"]
        assert title
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])]), title
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), title
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)


def test_the_dashboard_has_its_rows_and_variables() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    expected = [
        "Traffic",
        "Latency",
        "KV cache and batching",
        "Speculation",
        "Workers and errors",
        "Tenants",
        "Gateway",
    ]
    assert rows == expected
    assert list(VARIABLES) == ["datasource", "model_name", "instance", "gateway"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__all"} == VARIABLES.keys()


def test_panels_fit_and_do_not_overlap() -> None:
    places = {panel["title"]: panel["gridPos"] for panel in DASHBOARD["panels"]}
    assert [title for title, at in places.items() if not 0 <= at["x"] < at["x"] + at["w"] <= 24] == []
    cells = [
        (at["x"] + column, at["y"] + line)
        for at in places.values()
        for column in range(at["w"])
        for line in range(at["h"])
    ]
    assert len(cells) == len(set(cells))


# ------------------------------------------------------------------------------------------------ a real Prometheus

WITHOUT_DATA = "Refusals for limits of tenants A"
"""The only query of the dashboard that has no data below: no tenant has a limit."""
NUM_SCRAPES = 20
"""Enough for every rate."""
SERVE = (
    "--port=0",
    "--http-port=0",
    "--metrics-listen=127.0.0.1:0",
    "--admin-listen=off",
    "--kv-cache-memory-bytes=64M",
    "--unknown-fields=ignore",
    '--speculative-config={"method": "ngram", "num_speculative_tokens": 4}',
)


@pytest.fixture
def targets() -> Iterator[dict[str, str]]:
    """The address of each job: a service on the demo model and its gateway, after some requests and calls.
    One of each has failed."""
    with serving(*SERVE, stdin=subprocess.DEVNULL) as (_, greeting):
        metrics = re.search(r"curl http://([\d.:]+)/metrics", greeting)
        assert metrics is not None, greeting
        with Client(target_of(greeting)) as client:
            for _ in range(3):
                client.complete("one two three one two three one two", max_tokens=40)
            with pytest.raises(RequestFailed):
                client.complete("x", temperature=-1.0)
        with grpc.insecure_channel(target_of(greeting)) as channel, pytest.raises(grpc.RpcError):
            GenerationServiceStub(channel).Complete(pb.CompleteRequest())
        body = json.dumps({"prompt": "hi", "max_tokens": 4, "unheard_of": 1}).encode()
        headers = {"content-type": "application/json"}
        gateway = http_target_of(greeting)
        request = urllib.request.Request(f"http://{gateway}/v1/completions", data=body, headers=headers)
        urllib.request.urlopen(request, timeout=120).close()
        yield {"penstock": metrics[1], "penstock-gateway": gateway}


def filled_in(query: str) -> str:
    """A query of the dashboard as Grafana sends it when everything is selected."""
    return re.sub(r"\$(model_name|instance|gateway)\b", ".*", query).replace("$__rate_interval", "30s")


@pytest.mark.soak
@skip_without("prometheus")
async def test_prometheus_accepts_every_query_and_has_its_data(targets: dict[str, str], tmp_path: Path) -> None:
    jobs = read_yaml("prometheus.yml")["scrape_configs"]
    for job in jobs:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    async with running_prometheus(tmp_path, jobs, [PROMETHEUS / "alerts.yml"]) as prometheus:
        assert {each["health"] for each in await prometheus.scraped()} == {"up"}
        enough = f"count_over_time(up[1h]) >= {NUM_SCRAPES}"
        assert await until(lambda: has_results(prometheus, enough, len(targets)))

        queries = {f"{title} {ref}": filled_in(str(each["expr"])) for (title, ref), each in TARGETS.items()}
        assert [name for name, query in queries.items() if not await prometheus.query(query)] == [WITHOUT_DATA]

        groups = (await prometheus.ask("rules"))["groups"]
        evaluated = {rule["name"]: (rule["health"], rule["state"]) for group in groups for rule in group["rules"]}
        assert evaluated == dict.fromkeys(RULES, ("ok", "inactive"))

        values = {
            "model_name": "demo",
            "instance": targets["penstock"],
            "gateway": targets["penstock-gateway"],
        }
        for variable, value in values.items():
            query = re.fullmatch(r"label_values\((.+), (\w+)\)", VARIABLES[variable]["query"]["query"])
            assert query is not None, variable
            assert await prometheus.ask(f"label/{query[2]}/values", **{"match[]": filled_in(query[1])}) == [value]


async def has_results(prometheus: Prometheus, query: str, number: int) -> bool:
    """Whether a query has a number of results."""
    return len(await prometheus.query(query)) == number
