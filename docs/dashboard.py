"""The Grafana dashboard of the chart, made from a table of its panels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_WIDTH, _HEIGHT = 8, 8
_STAT_WIDTH, _STAT_HEIGHT = 4, 4


class Query(NamedTuple):
    """A query in PromQL, and the legend of its series."""

    expression: str
    legend: str = ""


class Chart(NamedTuple):
    """A panel: its title, what it shows, its unit by Grafana's names, and its queries."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    stacks: bool = False


def _rate(metric: str, labels: str = "") -> str:
    selector = ",".join(filter(None, ['model=~"$model"', labels]))
    return f"rate({metric}{{{selector}}}[$__rate_interval])"


def _sum(metric: str, labels: str = "") -> str:
    return f"sum({_rate(metric, labels)})"


def _quantiles(metric: str, labels: str = "", quantiles: Sequence[float] = (0.5, 0.9, 0.99)) -> list[Query]:
    buckets = f"sum by (le) ({_rate(f'{metric}_bucket', labels)})"
    return [Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in quantiles]


def _by(label: str, metric: str, labels: str = "") -> list[Query]:
    return [Query(f"sum by ({label}) ({_rate(metric, labels)})", f"{{{{{label}}}}}")]


_CACHED = _sum("singletree_tokens_total", 'kind="cached"')
_PROMPT = _sum("singletree_tokens_total", 'kind="prompt"')

STATS = (
    Chart("Generations", "Generations now.", "short", [Query("sum(singletree_generations_in_flight)")]),
    Chart(
        "Waiting",
        "Generations that wait for an engine.",
        "short",
        [Query("sum(singletree_generations_waiting)")],
    ),
    Chart(
        "Cached share",
        "Share of prompt tokens that the engines had in their prefix caches.",
        "percentunit",
        [Query(f"{_CACHED} / {_PROMPT}")],
    ),
    Chart(
        "Lost share",
        "Share of prompt tokens that should have continued the session and did not.",
        "percentunit",
        [Query(f"({_sum('singletree_prefix_lost_tokens_total')} or vector(0)) / {_PROMPT}")],
    ),
    Chart(
        "First token, p90",
        "From the request's arrival to its first event.",
        "s",
        _quantiles("singletree_time_to_first_token_seconds", quantiles=(0.9,)),
    ),
    Chart(
        "Failed requests",
        "Share of requests that were answered with a status of 500 or more.",
        "percentunit",
        [
            Query(
                '(sum(rate(singletree_requests_total{status=~"5.."}[$__rate_interval])) or vector(0))'
                " / sum(rate(singletree_requests_total[$__rate_interval]))"
            )
        ],
    ),
)
"""Single numbers, in the first row."""

CHARTS = (
    Chart(
        "Time to first token",
        "From the request's arrival to its first event.",
        "s",
        _quantiles("singletree_time_to_first_token_seconds"),
    ),
    Chart(
        "Time between tokens",
        "Mean of each answer.",
        "s",
        _quantiles("singletree_time_per_output_token_seconds"),
    ),
    Chart(
        "Time of answers",
        "From the request's arrival to the end of its answer.",
        "s",
        _quantiles("singletree_answer_seconds"),
    ),
    Chart("Length of prompts", "In tokens.", "short", _quantiles("singletree_request_prompt_tokens")),
    Chart("Length of answers", "In tokens.", "short", _quantiles("singletree_request_output_tokens")),
    Chart(
        "Share of prompts in place",
        "Share of a prompt that continues its session; without first prompts. The low quantiles are the breaks.",
        "percentunit",
        _quantiles("singletree_prefix_in_place_ratio", 'course!="first"', (0.5, 0.1, 0.01)),
    ),
    Chart(
        "Tokens",
        "Tokens a second: prompt, of which cached; completion, of which reasoning.",
        "short",
        _by("kind", "singletree_tokens_total"),
    ),
    Chart(
        "How prompts continue",
        "Prompts a second: first of a conversation, appended to the last, back to an earlier turn, broken.",
        "short",
        _by("course", "singletree_prefix_courses_total"),
        stacks=True,
    ),
    Chart(
        "Lost tokens by cause",
        "Tokens a second that should have continued the session and did not, by the likely cause.",
        "short",
        _by("cause", "singletree_prefix_lost_tokens_total"),
        stacks=True,
    ),
    Chart(
        "Dispatch of tool calls",
        "From the token that completes a call to the write that sends it.",
        "s",
        _quantiles("singletree_tool_call_dispatch_seconds"),
    ),
    Chart(
        "Queue",
        "How long generations waited for a place on an engine, of those that waited.",
        "s",
        _quantiles("singletree_queue_seconds"),
    ),
    Chart(
        "Generations and queue",
        "Generations now, and those that wait.",
        "short",
        [
            Query("sum(singletree_generations_in_flight)", "running"),
            Query("sum(singletree_generations_waiting)", "waiting"),
        ],
    ),
    Chart(
        "Ends of generations",
        "Generations a second by how they ended.",
        "short",
        _by("reason", "singletree_generations_total"),
        stacks=True,
    ),
    Chart(
        "Requests",
        "Requests a second by HTTP status.",
        "short",
        [Query("sum by (status) (rate(singletree_requests_total[$__rate_interval]))", "{{status}}")],
        stacks=True,
    ),
    Chart(
        "Engines",
        "Generations a second by the engine that they were sent to.",
        "short",
        _by("worker", "singletree_routed_generations_total"),
        stacks=True,
    ),
    Chart(
        "Cache of engines beside the prediction",
        "Prompt tokens a second: predicted in the engine's cache, cached as it reports, missing and unexpected.",
        "short",
        _by("kind", "singletree_routing_tokens_total"),
    ),
    Chart(
        "Replayed turns",
        "Earlier turns a second that were in a prompt by their own tokens.",
        "short",
        _by("model", "singletree_replayed_turns_total"),
    ),
    Chart(
        "Stability rules",
        "Prompts a second that a rule changed.",
        "short",
        [Query("sum by (rule) (rate(singletree_stability_rules_total[$__rate_interval]))", "{{rule}}")],
    ),
)


def page() -> str:
    """Return the dashboard as JSON, in Grafana's form for files."""
    value = {
        "uid": "singletree",
        "title": "singletree",
        "description": "Agents on open models: latency, prefix cache, tool calls, engines.",
        "tags": ["singletree", "llm"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_data_source(), _model()]},
        "annotations": {"list": []},
        "panels": [*_panels()],
    }
    return json.dumps(value, indent=2) + "\n"


def queries() -> list[str]:
    """Return the PromQL of all panels and variables."""
    charts = [query.expression for chart in (*STATS, *CHARTS) for query in chart.queries]
    return [*charts, _MODELS]


_MODELS = "singletree_tokens_total"


def _data_source() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"}


def _model() -> dict[str, Any]:
    return {
        "type": "query",
        "name": "model",
        "label": "Model",
        "datasource": _SOURCE,
        "query": {"query": f"label_values({_MODELS}, model)", "refId": "models"},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
    }


def _panels() -> Iterator[dict[str, Any]]:
    for number, chart in enumerate(STATS):
        place = {"x": number * _STAT_WIDTH, "y": 0, "w": _STAT_WIDTH, "h": _STAT_HEIGHT}
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "none",
            "graphMode": "area",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "auto",
        }
        yield _panel(1 + number, "stat", chart, place, options, {"unit": chart.unit})
    in_row = _COLUMNS // _WIDTH
    for number, chart in enumerate(CHARTS):
        row, column = divmod(number, in_row)
        place = {"x": column * _WIDTH, "y": _STAT_HEIGHT + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        custom = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if chart.stacks else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if chart.stacks else "none", "group": "A"},
        }
        defaults = {"unit": chart.unit, "min": 0, "custom": custom}
        yield _panel(100 + number, "timeseries", chart, place, options, defaults)


def _panel(
    id: int, kind: str, chart: Chart, place: dict[str, int], options: dict[str, Any], defaults: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": id,
        "type": kind,
        "title": chart.title,
        "description": chart.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "options": options,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "datasource": _SOURCE,
                "refId": chr(ord("A") + number),
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
                "range": True,
            }
            for number, query in enumerate(chart.queries)
        ],
    }
