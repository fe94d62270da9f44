"""The Helm chart, the compose file and the container file, by the tools that read them: ``make deploy``."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from deploy.deploy_tools import CHART, COMPOSE, check_compose, container_steps, hadolint, render
from engines.real_vllm import ROOT
from singletree.engines.workers import RouterMode
from singletree.server.http.route_table import ROUTES
from singletree.server.settings.config import Config
from singletree.server.telemetry import Tracing

pytestmark = pytest.mark.deploy

EVERYTHING: dict[str, Any] = {
    "secret": {
        "apiKey": "a",
        "capsuleKey": "b",
        "turnMemoryUrl": "redis://redis:6379/0",
        "storeUrl": "postgresql://db/x",
    },
    "server": {"workers": 4, "config": {"hold-seconds": 60, "model": "Qwen/Qwen3-8B"}, "drainSeconds": 900},
    "engines": {"vllm": {"replicas": 3, "gpus": 4, "arguments": ["--max-model-len=131072"]}},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "grafanaDashboard": {"enabled": True},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
}
REMOTE: dict[str, Any] = {"engines": {"urls": ["http://a:8000", "http://b:8000"]}, "existingSecret": "keys"}
CUSTOM_RESOURCES = {"ServiceMonitor", "PrometheusRule", "InferencePool"}
"""Kinds that operators bring; their schemas are in no package."""


@cache
def _rendered(which: str) -> dict[str, Any]:
    return render({"default": {}, "everything": EVERYTHING, "remote": REMOTE}[which])


def manifest(which: str, kind: str, name: str = "") -> dict[str, Any]:
    found = [
        each
        for each in _rendered(which)["manifests"]
        if each["kind"] == kind and each["metadata"]["name"].endswith(name)
    ]
    assert len(found) == 1, (kind, name, len(found))
    return copy.deepcopy(found[0])


def test_the_chart_has_alerts_and_a_dashboard() -> None:
    rules = manifest("everything", "PrometheusRule")["spec"]
    assert len(rules["groups"][0]["rules"]) == 10
    data = manifest("everything", "ConfigMap", "-dashboard")["data"]
    assert json.loads(data["singletree.json"])["uid"] == "singletree"


def server_container(which: str) -> dict[str, Any]:
    [container] = manifest(which, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def settings(which: str) -> dict[str, Any]:
    return tomllib.loads(manifest(which, "ConfigMap", "singletree")["data"]["singletree.toml"])


@pytest.mark.parametrize("which", ["default", "everything", "remote"])
def test_the_chart_renders_what_kubernetes_accepts(which: str) -> None:
    rendered = _rendered(which)
    assert rendered["problems"] == []
    assert set(rendered["unknown"]) <= CUSTOM_RESOURCES
    assert rendered["lint"]["errors"] == []
    assert [message for message in rendered["lint"]["messages"] if message["severity"] > 1] == []


def test_the_chart_renders_each_kind() -> None:
    kinds = {each["kind"] for each in _rendered("everything")["manifests"]}
    assert kinds >= CUSTOM_RESOURCES | {
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Secret",
        "Service",
        "StatefulSet",
    }
    assert "StatefulSet" not in {each["kind"] for each in _rendered("remote")["manifests"]}


@pytest.mark.parametrize("which", ["default", "everything", "remote"])
def test_the_settings_are_flags_of_the_server(which: str) -> None:
    known = {name.replace("_", "-") for name in Config.__dataclass_fields__}
    assert set(settings(which)) <= known


def test_the_server_addresses_every_engine() -> None:
    name = manifest("everything", "StatefulSet")["metadata"]["name"]
    service = manifest("everything", "Service", "-engine")
    assert service["metadata"]["name"] == manifest("everything", "StatefulSet")["spec"]["serviceName"] == name
    assert service["spec"]["clusterIP"] == "None"
    hosts = [f"{name}-{number}.{name}.ai.svc" for number in range(3)]
    assert settings("everything")["engine-url"] == [f"http://{host}:8000" for host in hosts]
    assert settings("everything")["kv-events"] == [f"tcp://{host}:5557" for host in hosts]
    assert settings("remote")["engine-url"] == ["http://a:8000", "http://b:8000"]


def test_the_chart_takes_the_modes_of_the_server() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    found = [each["routerMode"]["enum"] for each in _objects(schema) if "routerMode" in each]
    assert found == [list(get_args(RouterMode))]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(each)
    if isinstance(value, dict):
        yield value


def test_the_probes_ask_routes_of_the_server() -> None:
    container = server_container("everything")
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths <= {row.path for row in ROUTES if row.scope == "open"}
    assert container["livenessProbe"]["httpGet"]["path"] != container["readinessProbe"]["httpGet"]["path"]


def test_the_autoscaler_reads_metrics_of_the_server() -> None:
    metrics = manifest("everything", "HorizontalPodAutoscaler")["spec"]["metrics"]
    named = {each["pods"]["metric"]["name"] for each in metrics if each["type"] == "Pods"}
    exposed = set(re.findall(r"^# TYPE (\S+) gauge", Tracing().exposition().decode(), re.MULTILINE))
    assert named <= exposed
    assert "singletree_generations_waiting" in named


def test_a_pod_may_finish_its_turns() -> None:
    pod = manifest("everything", "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    longest = settings("everything")["drain-seconds"] + container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > longest >= 900


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"server": {"terminationGracePeriodSeconds": 30}}, "turns are cut"),
        ({"server": {"config": {"engine-url": "http://x"}}}, "engine-url is set by the chart"),
        ({"engines": {"routerMode": "best"}}, "routerMode"),
        ({"secret": {"storeUrl": "sqlite:///x"}}, "storeUrl"),
        ({"replicas": 2}, "replicas"),
        ({"inferencePool": {"enabled": True}}, "endpoint picker"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_wrong_values_are_refused(values: dict[str, Any], complaint: str) -> None:
    assert complaint in render(values).get("error", "")


def test_secrets_are_in_the_secret_alone() -> None:
    secret = manifest("everything", "Secret")["stringData"]
    assert secret["turn-memory-url"] == "redis://redis:6379/0"
    others = [each for each in _rendered("everything")["manifests"] if each["kind"] != "Secret"]
    assert "redis://" not in str(others)
    references = [
        each["valueFrom"]["secretKeyRef"] for each in server_container("remote")["env"] if "valueFrom" in each
    ]
    assert {each["name"] for each in references} == {"keys"}


def test_each_variable_of_the_server_is_a_flag() -> None:
    named = [each["name"] for each in server_container("everything")["env"]]
    flags = {name.removeprefix("SINGLETREE_").lower() for name in named if name.startswith("SINGLETREE_")}
    assert flags - {"cache"} <= set(Config.__dataclass_fields__)


def test_the_compose_file_is_valid() -> None:
    check_compose()
    text = COMPOSE.read_text(encoding="utf-8")
    drain = re.search(r'SINGLETREE_DRAIN_SECONDS: "(\d+)"', text)
    grace = re.search(r"stop_grace_period: (\d+)s", text)
    assert drain is not None
    assert grace is not None
    assert int(grace[1]) > int(drain[1])


def test_the_container_file_is_well_formed() -> None:
    assert hadolint() == ""
    steps = container_steps()
    assert [value for instruction, value in steps if instruction == "USER"][-1] == "10001:10001"
    assert {"HEALTHCHECK", "ENTRYPOINT", "STOPSIGNAL"} <= {instruction for instruction, _ in steps}


def test_the_steps_of_the_container_file_give_a_server(tmp_path: Path) -> None:
    """No container engine runs here: the steps of the build stage run in a folder, with this machine's Python."""
    build, target = tmp_path / "build", tmp_path / "opt"
    build.mkdir()
    for instruction, value in container_steps():
        if instruction == "FROM" and "AS build" not in value:
            break
        if instruction == "COPY":
            *sources, place = value.split()
            for source in sources:
                wanted = build / place / (Path(source).name if place.endswith("/") else "")
                wanted.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, wanted, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, wanted)
        if instruction == "RUN":
            command = value.replace("/opt/singletree", str(target)).replace("/build", str(build))
            command = re.sub(r"(^|&& )python ", rf"\1{sys.executable} ", command)
            done = subprocess.run(
                ["sh", "-c", command], cwd=build, capture_output=True, text=True, timeout=900, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
    # The virtual environment is not copied here, so that its paths hold.
    program = str(target / "bin" / "singletree")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert version.stdout.strip()
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    helps = subprocess.run(
        [program, "serve", "--help"], capture_output=True, text=True, timeout=60, env=clean, check=True
    )
    assert "--engine-url" in helps.stdout


def test_the_chart_has_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = (CHART / "Chart.yaml").read_text(encoding="utf-8")
    assert f"appVersion: {project['version']}" in chart
    assert f"image: singletree:{project['version']}" in COMPOSE.read_text(encoding="utf-8")
