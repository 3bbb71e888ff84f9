"""One panel of a dashboard, as Grafana 10 to 13 read it.

Law: every panel has a title, a description that says what to do, a unit, and `${datasource}`. Numbers that stand for
"now" (stat, gauge, bargauge, table) are instant queries: the last value of a range may be from before the traffic
stopped, and would pass for the present one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.links import Link
from dashboards.promql import written

Json = dict[str, Any]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Without a version Grafana runs the migrations of very old panels, which for example cap a percentage at 100.
PLUGIN_VERSION = "10.4.0"

GREEN, YELLOW, ORANGE, RED, BLUE, PURPLE, GREY = "green", "yellow", "orange", "red", "blue", "purple", "#8e8e8e"


@dataclass(frozen=True)
class Query:
    """An expression in the short form of promql.py, and what its series are called."""

    expr: str
    legend: str = ""
    exemplars: bool = False


def thresholds(first: str, *steps: tuple[float, str]) -> Json:
    """`thresholds(GREEN, (0.8, RED))`: green, and red from 0.8 on."""
    listed = [{"color": first, "value": None}, *({"color": color, "value": value} for value, color in steps)]
    return {"mode": "absolute", "steps": listed}


def fixed_colors(colors: Mapping[str, str]) -> list[Json]:
    """Overrides that give a series of that name (or `/pattern/`) its colour, the same on every dashboard."""
    return [
        {
            "matcher": {"id": "byRegexp" if name.startswith("/") else "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
        }
        for name, color in colors.items()
    ]


def links_on(pattern: str, *links: Link) -> Json:
    """An override that gives links to the series whose name fits `/pattern/`, and to no others."""
    shown = [{"title": link.title, "url": link.url, "targetBlank": True} for link in links]
    return {"matcher": {"id": "byRegexp", "options": pattern}, "properties": [{"id": "links", "value": shown}]}


def _panel(
    kind: str,
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    now: bool,
    form: str = "time_series",
    defaults: Json | None = None,
    overrides: Sequence[Json] = (),
    options: Json | None = None,
    links: Sequence[Link] = (),
) -> Json:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "pluginVersion": PLUGIN_VERSION,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": written(query.expr),
                "legendFormat": query.legend or "__auto",
                "format": form,
                "instant": now,
                "range": not now,
                "exemplar": query.exemplars,
            }
            for number, query in enumerate(queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "color": {"mode": "palette-classic"},
                "thresholds": thresholds(GREEN),
                "mappings": [],
                "links": [{"title": link.title, "url": link.url, "targetBlank": True} for link in links],
                **(defaults or {}),
            },
            "overrides": list(overrides),
        },
        "options": options or {},
    }


def _reduced(**more: Any) -> Json:
    return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "orientation": "auto", **more}


def stat(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    steps: Json | None = None,
    nothing: str = "no data",
    mappings: Sequence[Json] = (),
    decimals: int | None = None,
    text: str = "auto",
    links: Sequence[Link] = (),
) -> Json:
    """A number. `nothing` is what is shown when there is none: say why there is none."""
    defaults: Json = {"color": {"mode": "thresholds"}, "noValue": nothing, "mappings": list(mappings)}
    if steps is not None:
        defaults["thresholds"] = steps
    if decimals is not None:
        defaults["decimals"] = decimals
    options = _reduced(
        colorMode="background" if steps is not None else "value",
        graphMode="none",
        justifyMode="auto",
        textMode=text,
        wideLayout=True,
        showPercentChange=False,
        percentChangeColorMode="standard",
    )
    return _panel("stat", title, description, unit, queries, now=True, defaults=defaults, options=options, links=links)


def gauge(title: str, description: str, unit: str, *queries: Query, steps: Json, nothing: str = "no data") -> Json:
    """A number between 0 and 1 on a dial."""
    defaults = {"color": {"mode": "thresholds"}, "thresholds": steps, "min": 0, "max": 1, "noValue": nothing}
    options = _reduced(showThresholdLabels=False, showThresholdMarkers=True, minVizWidth=75, minVizHeight=75)
    return _panel("gauge", title, description, unit, queries, now=True, defaults=defaults, options=options)


def bar_gauge(
    title: str, description: str, unit: str, *queries: Query, steps: Json, links: Sequence[Link] = ()
) -> Json:
    """One bar for each series, now."""
    defaults = {"color": {"mode": "thresholds"}, "thresholds": steps, "min": 0, "noValue": "0"}
    options = _reduced(
        displayMode="basic", valueMode="color", namePlacement="auto", showUnfilled=True, sizing="auto",
        minVizWidth=8, minVizHeight=16, maxVizHeight=300,
    )  # fmt: skip
    options["orientation"] = "horizontal"
    return _panel(
        "bargauge", title, description, unit, queries, now=True, defaults=defaults, options=options, links=links
    )


def series(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    steps: Json | None = None,
    colors: Mapping[str, str] | None = None,
    overrides: Sequence[Json] = (),
    top: float | None = None,
    as_bars: bool = False,
    links: Sequence[Link] = (),
) -> Json:
    """Lines over time. A gap in the data stays a gap."""
    custom: Json = {
        "drawStyle": "bars" if as_bars else "line",
        "lineWidth": 1,
        "fillOpacity": 60 if as_bars else 40 if stacked else 8,
        "lineInterpolation": "linear",
        "showPoints": "auto",
        "pointSize": 4,
        "spanNulls": False,
        "insertNulls": False,
        "axisPlacement": "auto",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "scaleDistribution": {"type": "linear"},
        "thresholdsStyle": {"mode": "dashed" if steps is not None else "off"},
    }
    defaults: Json = {"custom": custom, "min": 0}
    if steps is not None:
        defaults["thresholds"] = steps
    if top is not None:
        defaults["max"] = top
    options = {
        "legend": {"showLegend": True, "displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    overrides = [*fixed_colors(colors or {}), *overrides]
    return _panel(
        "timeseries", title, description, unit, queries,
        now=False, defaults=defaults, overrides=overrides, options=options, links=links,
    )  # fmt: skip


def state_timeline(
    title: str, description: str, query: Query, states: Sequence[tuple[int, str, str]], links: Sequence[Link] = ()
) -> Json:
    """Coloured bands over time; `states` are (value, word, colour)."""
    mapping = {str(value): {"text": word, "color": color, "index": value} for value, word, color in states}
    defaults: Json = {
        "color": {"mode": "thresholds"},
        "thresholds": thresholds(states[0][2], *((value, color) for value, _, color in states[1:])),
        "mappings": [{"type": "value", "options": mapping}],
        "custom": {"fillOpacity": 80, "lineWidth": 0},
    }
    options = {
        "alignValue": "left",
        "mergeValues": True,
        "rowHeight": 0.9,
        "showValue": "auto",
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return _panel(
        "state-timeline", title, description, "none", [query],
        now=False, defaults=defaults, options=options, links=links,
    )  # fmt: skip


def heatmap(title: str, description: str, unit: str, query: Query) -> Json:
    """Buckets of a histogram over time."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": "short"},
        "color": {
            "mode": "scheme", "scheme": "Oranges", "steps": 64, "fill": "dark-orange", "scale": "exponential",
            "exponent": 0.5, "reverse": False,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
    }  # fmt: skip
    defaults = {"custom": {"hideFrom": {"legend": False, "tooltip": False, "viz": False}}}
    return _panel(
        "heatmap", title, description, unit, [query], now=False, form="heatmap", defaults=defaults, options=options
    )


@dataclass(frozen=True)
class Column:
    """One query of a table, and how its values look."""

    name: str
    expr: str
    unit: str
    steps: Json | None = None


def table(title: str, description: str, key: str, *columns: Column, links: Sequence[Link] = ()) -> Json:
    """One line for each value of the label `key`, one column for each query, joined by that label."""
    names = {f"Value #{chr(ord('A') + number)}": column.name for number, column in enumerate(columns)}
    if len(columns) == 1:
        names = {"Value": columns[0].name, **names}  # Grafana numbers the columns only when there are several
    overrides: list[Json] = []
    for column in columns:
        properties: list[Json] = [{"id": "unit", "value": column.unit}]
        if column.steps is not None:
            properties += [
                {"id": "thresholds", "value": column.steps},
                {"id": "custom.cellOptions", "value": {"type": "color-background", "mode": "basic"}},
            ]
        overrides.append({"matcher": {"id": "byName", "options": column.name}, "properties": properties})
    heading = key.capitalize()
    custom = {"align": "auto", "filterable": True, "inspect": False, "cellOptions": {"type": "auto"}}
    options = {
        "cellHeight": "sm",
        "showHeader": True,
        "sortBy": [{"displayName": columns[0].name, "desc": True}],
    }
    panel = _panel(
        "table", title, description, "short", [Query(column.expr) for column in columns], now=True, form="table",
        defaults={"color": {"mode": "thresholds"}, "noValue": "–", "custom": custom},
        overrides=overrides, options=options,
    )  # fmt: skip
    panel["transformations"] = [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {"Time": True},
                "indexByName": {name: place for place, name in enumerate((key, *names))},
                "renameByName": {key: heading, **names},
            },
        },
    ]
    if links:
        shown = [
            {"title": link.title, "url": link.url.replace(f"__field.labels.{key}", "__value.text"), "targetBlank": True}
            for link in links
        ]
        panel["fieldConfig"]["overrides"].append(
            {"matcher": {"id": "byName", "options": heading}, "properties": [{"id": "links", "value": shown}]}
        )
    return panel
