"""The frame of a dashboard: variables, annotations, links to its sisters, and where each panel lies.

Law: identifiers are fixed (uid of the dashboard, number of each panel by its place), so that a link or a saved
address goes on working after the next generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.panel import DATASOURCE, Json
from dashboards.promql import written

TAG = "sidecar"
# Grafana 10.3 wrote 39; later ones read it and bring it up to date by themselves.
SCHEMA_VERSION = 39
COLUMNS = 24


@dataclass(frozen=True)
class Row:
    """A question as a heading, and lines of panels that answer it."""

    question: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Line:
    """Panels side by side. Each is as wide as `widths` says; without it they share the line evenly."""

    height: int
    panels: Sequence[Json]
    widths: Sequence[int] = ()

    def shares(self) -> Sequence[int]:
        if self.widths:
            return self.widths
        even, left = divmod(COLUMNS, len(self.panels))
        return [even + (place < left) for place in range(len(self.panels))]


def laid_out(rows: Sequence[Row]) -> list[Json]:
    """The panels with numbers and places, top-down. A row's heading is a panel of its own."""
    placed: list[Json] = []
    y = 0
    for row in rows:
        heading = {"type": "row", "title": row.question, "collapsed": False, "panels": []}
        placed.append({"id": len(placed) + 1, "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}, **heading})
        y += 1
        for line in row.lines:
            x = 0
            for panel, width in zip(line.panels, line.shares(), strict=True):
                place = {"x": x, "y": y, "w": width, "h": line.height}
                placed.append({"id": len(placed) + 1, "gridPos": place, **panel})
                x += width
            y += line.height
    return placed


def board(uid: str, title: str, description: str, rows: Sequence[Row]) -> Json:
    return {
        "id": None,
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "liveNow": False,
        "weekStart": "",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "refresh": "30s",
        "links": [_sisters()],
        "templating": {"list": _variables()},
        "annotations": {"list": _annotations()},
        "panels": laid_out(rows),
    }


def _sisters() -> Json:
    return {
        "type": "dashboards",
        "title": "Sidecar",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "The other sidecar dashboards, with the same variables and time",
        "url": "",
    }


def _variables() -> list[Json]:
    metric, chosen = "sidecar_build_info", 'job=~"$job"'
    return [
        _source("datasource", "Data source", "prometheus", "The Prometheus that scrapes the sidecars"),
        # `.*` lets series without a job label through, which `.+` would not.
        _choice("job", "Job", f"label_values({metric}, job)", ".*", "The scrape job of the sidecars"),
        _choice("instance", "Instance", f"label_values({metric}{{{chosen}}}, instance)", ".+", "One sidecar each"),
        _choice(
            "upstream", "Upstream", f'label_values(sidecar_sessions_total{{{chosen},instance=~"$instance"}}, upstream)',
            ".+", "Who the app calls: a configured name, host:port, _other, or _none where routing refused",
        ),
        _source("traces", "Traces", "tempo", "Where links to traces lead"),
        {
            "type": "textbox",
            "name": "admin",
            "label": "Admin port",
            "description": "Base address of a sidecar's admin port as your browser reaches it; links to sessions and "
            "dead letters lead there",
            "query": "http://127.0.0.1:4141",
            "current": {"text": "http://127.0.0.1:4141", "value": "http://127.0.0.1:4141"},
            "options": [{"selected": True, "text": "http://127.0.0.1:4141", "value": "http://127.0.0.1:4141"}],
            "hide": 0,
            "skipUrlSync": False,
        },
    ]  # fmt: skip


def _source(name: str, label: str, kind: str, description: str) -> Json:
    return {
        "type": "datasource",
        "name": name,
        "label": label,
        "description": description,
        "query": kind,
        "regex": "",
        "current": {},
        "options": [],
        "multi": False,
        "includeAll": False,
        "refresh": 1,
        "hide": 0,
        "skipUrlSync": False,
    }


def _choice(name: str, label: str, query: str, every: str, description: str) -> Json:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "description": description,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "regex": "",
        "sort": 1,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        "multi": True,
        "includeAll": True,
        "allValue": every,
        "refresh": 2,  # whenever the time range changes: upstreams come and go
        "hide": 0,
        "skipUrlSync": False,
    }


def _annotations() -> list[Json]:
    builtin = {
        "builtIn": 1,
        "datasource": {"type": "grafana", "uid": "-- Grafana --"},
        "enable": True,
        "hide": True,
        "iconColor": "rgba(0, 211, 255, 1)",
        "name": "Annotations & Alerts",
        "type": "dashboard",
    }
    return [
        builtin,
        # The state rather than the transition: a band as long as the breaker was open, and the very first opening too,
        # which a counter that begins at 1 cannot show.
        _annotation(
            "Breaker open", "red", 'max by (upstream, endpoint) (sidecar_breaker_state{$S,state="open"}) == 1',
            "Breaker open: {{upstream}}", "{{endpoint}} is refused at once", "upstream,endpoint",
        ),
        _annotation(
            "Configuration reloaded", "blue",
            "sum by (instance, result) (increase(sidecar_config_reloads_total{$I}[$W])) > 0",
            "Configuration reload: {{result}}", "{{instance}}", "instance,result",
        ),
    ]  # fmt: skip


def _annotation(name: str, color: str, expr: str, title: str, text: str, tags: str) -> Json:
    expr = written(expr)
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": color,
        "expr": expr,  # Grafana 10 reads it here, later ones in the target
        "target": {"refId": "Anno", "datasource": DATASOURCE, "expr": expr},
        "titleFormat": title,
        "textFormat": text,
        "tagKeys": tags,
        "useValueForTime": False,
    }
