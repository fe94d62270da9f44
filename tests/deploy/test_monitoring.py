"""Dashboard and alerts: by Grafana's schema, by promtool, and by a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dashboard import queries
from deploy.deploy_tools import CHART, read_dashboard
from engines.real_vllm import free_port
from scale import databases
from scale.processes import Group, ask, serving
from singletree.server.telemetry import Tracing

pytestmark = pytest.mark.deploy

DASHBOARD = CHART / "files" / "dashboard.json"
ALERTS = CHART / "files" / "alerts.yaml"
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
TOOL = {"name": "ls", "description": "lists", "input_schema": {"type": "object"}}
SECONDS = 60

BAD: dict[str, dict[str, str]] = {
    "SingletreeAbsent": {},
    "SingletreeRequestsFail": {
        'singletree_requests_total{route="/v1/messages",status="200"}': "0+9x90",
        'singletree_requests_total{route="/v1/messages",status="500"}': "0+1x90",
    },
    "SingletreeModelFailed": {'singletree_model_state{model="m",state="failed"}': "1+0x90"},
    "SingletreeQueueIsLong": {"singletree_generations_waiting": "1+0x90"},
    "SingletreeFirstTokenIsSlow": {
        'singletree_time_to_first_token_seconds_bucket{model="m",le="60"}': "0+1x90",
        'singletree_time_to_first_token_seconds_bucket{model="m",le="120"}': "0+9x90",
        'singletree_time_to_first_token_seconds_bucket{model="m",le="+Inf"}': "0+9x90",
    },
    "SingletreePrefixBreaks": {
        'singletree_prefix_lost_tokens_total{model="m",cause="tools_changed"}': "0+200x90",
        'singletree_tokens_total{model="m",kind="prompt"}': "0+1000x90",
    },
    "SingletreeCacheIsEvicted": {
        'singletree_routing_tokens_total{model="m",worker="a",kind="missing"}': "0+400x90",
        'singletree_routing_tokens_total{model="m",worker="a",kind="predicted"}': "0+1000x90",
    },
    "SingletreeDispatchIsSlow": {
        'singletree_tool_call_dispatch_seconds_bucket{model="m",le="0.25"}': "0+9x90",
        'singletree_tool_call_dispatch_seconds_bucket{model="m",le="0.5"}': "0+10x90",
        'singletree_tool_call_dispatch_seconds_bucket{model="m",le="+Inf"}': "0+10x90",
    },
    "SingletreeTurnStoreFails": {'singletree_turn_store_failures_total{access="read"}': "0+1x90"},
    "SingletreeRecordsDropped": {"singletree_request_records_dropped_total": "0+1x90"},
}
"""Series, a value each minute, of which each alert fires."""

GOOD = {
    "singletree_generations_in_flight": "3+0x90",
    "singletree_generations_waiting": "0 2 0 1 0 0 5 0x84",
    'singletree_requests_total{route="/v1/messages",status="200"}': "0+99x90",
    'singletree_requests_total{route="/v1/messages",status="500"}': "0+1x90",
    'singletree_model_state{model="m",state="failed"}': "0+0x90",
    'singletree_time_to_first_token_seconds_bucket{model="m",le="60"}': "0+9x90",
    'singletree_time_to_first_token_seconds_bucket{model="m",le="+Inf"}': "0+9x90",
    'singletree_prefix_lost_tokens_total{model="m",cause="tools_changed"}': "0+20x90",
    'singletree_tokens_total{model="m",kind="prompt"}': "0+1000x90",
    'singletree_routing_tokens_total{model="m",worker="a",kind="missing"}': "0+40x90",
    'singletree_routing_tokens_total{model="m",worker="a",kind="predicted"}': "0+1000x90",
    'singletree_tool_call_dispatch_seconds_bucket{model="m",le="0.25"}': "0+10x90",
    'singletree_tool_call_dispatch_seconds_bucket{model="m",le="+Inf"}': "0+10x90",
    'singletree_turn_store_failures_total{access="read"}': "0+0x90",
    "singletree_request_records_dropped_total": "0+0x90",
}


def promtool(*arguments: str, given: bytes = b"") -> str:
    program = databases.install("prometheus", "promtool")
    done = subprocess.run(
        [program, *arguments], input=given, capture_output=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return (done.stdout + done.stderr).decode()


def test_grafana_knows_every_field_of_the_dashboard(tmp_path: Path) -> None:
    """Grafana's own types read the file: what they do not know is not in what they write."""
    own = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert list(_lost(own, read_dashboard(DASHBOARD))) == []
    own["panels"][-1]["fieldConfig"]["defaults"]["custom"]["lineColour"] = "red"
    unknown = tmp_path / "dashboard.json"
    unknown.write_text(json.dumps(own))
    assert list(_lost(own, read_dashboard(unknown))) == [
        f"/panels/{len(own['panels']) - 1}/fieldConfig/defaults/custom/lineColour"
    ]


def _lost(own: Any, read: Any, at: str = "") -> Iterator[str]:
    """Yield where ``own`` has something that ``read`` has not."""
    if isinstance(own, dict):
        for name, value in own.items():
            if isinstance(read, dict) and name in read:
                yield from _lost(value, read[name], f"{at}/{name}")
            else:
                yield f"{at}/{name}"
    elif isinstance(own, list) and isinstance(read, list) and len(own) == len(read):
        for number, (one, other) in enumerate(zip(own, read, strict=True)):
            yield from _lost(one, other, f"{at}/{number}")
    elif own != read:
        yield at


def test_the_rules_are_valid() -> None:
    assert "10 rules found" in promtool("check", "rules", str(ALERTS))


def test_each_alert_fires_when_it_should_and_none_when_all_is_well(tmp_path: Path) -> None:
    named = set(re.findall(r"alert: (\w+)", ALERTS.read_text(encoding="utf-8")))
    assert set(BAD) == named
    tests = [
        _test(
            series, f'count(ALERTS{{alertname="{name}",alertstate="firing"}})', [{"labels": "{}", "value": 1}]
        )
        for name, series in BAD.items()
    ]
    path = tmp_path / "tests.yaml"  # JSON is YAML
    tests.append(_test(GOOD, 'count(ALERTS{alertstate="firing"})', []))
    path.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(path))


def _test(series: dict[str, str], expression: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": "80m", "exp_samples": expected}],
    }


def test_promtool_finds_nothing_to_criticize_in_the_metrics(tmp_path: Path) -> None:
    with serving(tmp_path) as group:
        _talk(group)
        exposed = ask(group.connect(), "/metrics").body
    assert promtool("check", "metrics", given=exposed) == ""


def _talk(group: Group) -> None:
    """Let an agent call a tool and go on, streamed, and change the tool."""
    group.write_scripts(call=CALL, done="Done.")
    history: list[dict[str, Any]] = [{"role": "user", "content": "[[script:call,done]]"}]
    results = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}]
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "ls", "input": {}}]}
    longer, changed = [*history, call, *results], TOOL | {"description": "lists all"}
    for messages, tool in ((history, TOOL), (longer, TOOL), (longer, changed)):
        body = {"model": "scripted", "max_tokens": 99, "messages": messages, "tools": [tool], "stream": True}
        assert ask(group.connect(), "/v1/messages", body, x_session_id="s").status == 200


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """A Prometheus that scrapes the port ``target``, until the block ends."""
    program, port = databases.install("prometheus", "prometheus"), free_port()
    scraped = [{"job_name": "singletree", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}]
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": scraped,
    }
    (folder / "prometheus.yaml").write_text(json.dumps(settings))
    line = [
        program,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.txt").open("wb") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + SECONDS
        while not _is_up(url):
            assert time.monotonic() < until, (folder / "prometheus.txt").read_text()
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=SECONDS)


def _is_up(url: str) -> bool:
    try:
        return bool(query(url, 'up{job="singletree"} == 1'))
    except OSError:
        return False


def query(url: str, expression: str) -> list[Any]:
    """Return the series that Prometheus answers with. Raises OSError for a query that it refuses."""
    asked = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    with urllib.request.urlopen(asked, timeout=10) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
    return found


def test_a_real_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    exposed = Tracing().exposition().decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", exposed, re.MULTILINE))
    (tmp_path / "server").mkdir()
    with serving(tmp_path / "server") as group, prometheus(tmp_path, group.port) as url:
        _talk(group)
        time.sleep(3)
        _talk(group)
        time.sleep(3)
        empty = []
        for expression in queries():
            asked = expression.replace("$__rate_interval", "30s").replace("$model", ".*")
            if not query(url, asked):
                empty.append(expression)
    # One engine without a queue: nothing is routed, and no rule had to change a prompt.
    quiet = (
        "singletree_rout",
        "singletree_queue_seconds",
        "singletree_stability_rules",
        "singletree_replayed",
    )
    assert [each for each in empty if not any(name in each for name in quiet)] == []
    for name in set(re.findall(r"singletree_\w+", " ".join(queries()))):
        family = re.sub(r"_bucket$", "", name)
        assert family in kinds, name
