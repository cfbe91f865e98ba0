"""The manifests and the dashboard of docs/deploy against the server, its options, its ports and its metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from mtp_serving.cli import serve
from mtp_serving.triton.metrics import COUNTERS, GAUGES
from tests.serving.server import Running

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
TRITON_PATHS = {"/v2/health/ready", "/v2/health/live"}
"""As `tests/serving/triton` asks a real server."""
Manifest = dict[str, Any]


def manifests() -> list[Manifest]:
    """All documents of all files."""
    return [one for path in sorted(DEPLOY.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text("utf-8"))]


def of_kind(found: list[Manifest], kind: str) -> list[Manifest]:
    """Those of one kind."""
    return [one for one in found if one["kind"] == kind]


def arguments(container: Manifest) -> dict[str, str]:
    """Options with their values."""
    return dict(one.split("=", 1) for one in container["args"] if one.startswith("--"))


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether a selector chooses something with these labels."""
    return selector.items() <= labels.items()


def wrong_references(found: list[Manifest]) -> Iterator[str]:
    """What names something that is not there."""
    pods = {one["metadata"]["name"]: one["spec"]["template"] for one in of_kind(found, "Deployment")}
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(found, "Service")}
    for name, template in pods.items():
        (owner,) = (one for one in of_kind(found, "Deployment") if one["metadata"]["name"] == name)
        if owner["spec"]["selector"]["matchLabels"] != template["metadata"]["labels"]:
            yield f"{name} does not select its own pods"
        (container,) = template["spec"]["containers"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        if {mount["name"] for mount in container["volumeMounts"]} != volumes:
            yield f"{name} mounts other volumes than it has"
    for name, spec in services.items():
        chosen = [one for one in pods.values() if matches(spec["selector"], one["metadata"]["labels"])]
        if len(chosen) != 1:
            yield f"the service {name} chooses {len(chosen)} deployments"
            continue
        ports = {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
        if not {port["targetPort"] for port in spec["ports"]} <= ports:
            yield f"the service {name} has a port that its pods do not have"
    for budget in of_kind(found, "PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        if not any(matches(selector, one["metadata"]["labels"]) for one in pods.values()):
            yield f"the budget {budget['metadata']['name']} chooses nothing"
    for scaler in of_kind(found, "HorizontalPodAutoscaler"):
        if scaler["spec"]["scaleTargetRef"]["name"] not in pods:
            yield f"the autoscaler {scaler['metadata']['name']} scales nothing"
    for route in (*of_kind(found, "HTTPRoute"), *of_kind(found, "GRPCRoute")):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                name, port = backend["name"], backend["port"]
                if port not in [one["port"] for one in services.get(name, {}).get("ports", [])]:
                    yield f"{route['metadata']['name']} leads to {name}:{port}, which is not there"


def containers(image: str) -> list[tuple[Manifest, Manifest]]:
    """Containers of an image, each with the template of its pod."""
    found = []
    for deployment in of_kind(manifests(), "Deployment"):
        template = deployment["spec"]["template"]
        found += [(one, template) for one in template["spec"]["containers"] if one["image"].startswith(image)]
    assert found
    return found


def probes(container: Manifest) -> dict[str, Manifest]:
    """By name."""
    return {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}


def test_everything_that_is_named_is_there() -> None:
    assert list(wrong_references(manifests())) == []
    assert len(of_kind(manifests(), "Deployment")) == 3


def test_control_a_wrong_name_label_or_port_is_seen() -> None:
    def broken(kind: str, *path: str | int, value: Any) -> list[str]:
        found = deepcopy(manifests())
        place: Any = of_kind(found, kind)[0]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return list(wrong_references(found))

    labels = ("spec", "template", "metadata", "labels", "bundle")
    assert broken("Deployment", *labels, value="another")
    assert broken("Service", "spec", "selector", "pool", value="another")
    assert broken("Service", "spec", "ports", 0, "targetPort", value="another")
    assert broken("PodDisruptionBudget", "spec", "selector", "matchLabels", "app", value="another")
    assert broken("HorizontalPodAutoscaler", "spec", "scaleTargetRef", "name", value="another")
    assert broken("HTTPRoute", "spec", "rules", 0, "backendRefs", 0, "port", value=1)


def test_the_servers_of_the_pools_are_started_with_options_that_exist() -> None:
    for container, template in containers("mtp-serve"):
        context = serve.make_context("serve", container["args"][1:])
        assert container["args"][0] == serve.name
        given = context.params
        (port,) = (one["containerPort"] for one in container["ports"])
        assert given["port"] == port == int(template["metadata"]["annotations"]["prometheus.io/port"])
        assert given["host"] == "0.0.0.0"
        assert given["threads"] == int(container["resources"]["requests"]["cpu"])
        assert given["bundle"].name == template["metadata"]["labels"]["bundle"], "the label is the directory"
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert str(given["bundle"].parent) in mounts
        keys = {option.envvar for option in serve.params if isinstance(option, click.Option)}
        assert {one["name"] for one in container["env"]} <= keys
    with pytest.raises(click.UsageError):
        serve.make_context("serve", ["/bundles/x", "--drafts=3"])


def test_the_pools_have_policies_of_their_own() -> None:
    given = {one["metadata"]["labels"]["pool"]: arguments(container) for container, one in containers("mtp-serve")}
    longer, shorter = (int(given[pool]["--draft-tokens"]) for pool in ("latency", "throughput"))
    assert longer > shorter
    assert int(given["latency"]["--slots"]) < int(given["throughput"]["--slots"])


def test_the_probes_ask_paths_that_the_server_has(server: Running) -> None:
    for container, template in containers("mtp-serve"):
        found = probes(container)
        for probe in found.values():
            assert server.http.get(f"{server.url}{probe['path']}").status_code == 200
            assert probe["port"] in {port["name"] for port in container["ports"]}
        assert found["readinessProbe"]["path"] != found["livenessProbe"]["path"], "draining must not kill"
        scraped = template["metadata"]["annotations"]["prometheus.io/path"]
        assert server.http.get(f"{server.url}{scraped}").status_code == 200
    assert server.http.get(f"{server.url}/healthz").status_code == 404, "control"


def test_routes_lead_to_paths_that_the_server_has(server: Running) -> None:
    (route,) = of_kind(manifests(), "HTTPRoute")
    prefixes = {match["path"]["value"] for rule in route["spec"]["rules"] for match in rule["matches"]}
    assert prefixes == {"/v1/"}
    assert server.http.get(f"{server.url}/v1/models").status_code == 200


def test_the_ports_of_triton_are_those_it_is_started_with() -> None:
    ((container, template),) = containers("mtp-triton")
    given = arguments(container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {name: int(given[f"--{name}-port"]) for name in ("http", "grpc", "metrics")}
    assert int(template["metadata"]["annotations"]["prometheus.io/port"]) == ports["metrics"]
    assert {probe["path"] for probe in probes(container).values()} == TRITON_PATHS
    assert {probe["port"] for probe in probes(container).values()} == {"http"}


def test_a_pod_has_time_to_finish_its_answers() -> None:
    for image, option in (("mtp-serve", "--timeout"), ("mtp-triton", "--exit-timeout-secs")):
        for container, template in containers(image):
            before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
            grace = template["spec"]["terminationGracePeriodSeconds"]
            assert before > 0
            assert grace > before + int(arguments(container)[option])


def test_the_autoscalers_follow_a_metric_that_both_servers_have(server: Running) -> None:
    (rules,) = of_kind(manifests(), "ConfigMap")
    (rule,) = yaml.safe_load(rules["data"]["config.yaml"])["rules"]
    (name,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert re.fullmatch(rule["name"]["matches"], name)
    assert name in families(server)
    assert name in GAUGES
    metrics = [
        one["pods"]["metric"]["name"]
        for scaler in of_kind(manifests(), "HorizontalPodAutoscaler")
        for one in scaler["spec"]["metrics"]
    ]
    assert set(metrics) == {rule["name"]["as"]}
    assert len(metrics) == len(of_kind(manifests(), "Deployment"))


def families(server: Running) -> set[str]:
    """Names of all series that the server can have, those that have no value yet too."""
    found = set()
    for line in server.http.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            found |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


def named(text: str) -> set[str]:
    """Names of our metrics in an expression."""
    return set(re.findall(r"mtp:\w+", text))


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(server: Running) -> None:
    server.post("/v1/completions", {"prompt": "The", "max_tokens": 12, "temperature": 0, "draft_tokens": 2})
    board = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = set().union(*map(named, expressions), named(json.dumps(board["templating"])))
    known = families(server)
    assert asked - known == set()
    assert len(asked) > 20, "control: the dashboard has expressions"
    assert named("rate(mtp:spec_decode_num_draft[1m])") - known, "control: a name that is none"
    text = server.http.get(f"{server.url}/metrics").text
    for label in ("finished_reason", "position", "draft_tokens", "model_name"):
        assert any(f"{label}" in one for one in expressions)
        assert f'{label}="' in text
    grouped = {label for one in expressions for label in re.findall(r"by \((\w+)\)", one)}
    assert grouped <= {"le", "finished_reason", "position", "draft_tokens"}


def test_the_dashboard_is_laid_out_without_overlaps_and_its_parentheses_close() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
    taken = set()
    for panel in board["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        for target in panel["targets"]:
            for opening, closing in ("()", "{}", "[]"):
                assert target["expr"].count(opening) == target["expr"].count(closing)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_metrics_that_both_servers_share_are_named_alike(server: Running) -> None:
    ours, theirs = families(server), set(COUNTERS) | set(GAUGES)
    assert "mtp:spec_decode_num_accepted_tokens_total" in ours & theirs
