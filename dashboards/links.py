"""Where a click on a value leads: to the sidecar's admin port, or to the traces.

Law: a link names no host. The admin port and the trace store are variables of the dashboard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True)
class Link:
    """Where a click on a value leads."""

    title: str
    url: str


def sessions_link(*labels: str, **fixed: str) -> Link:
    """The sessions behind a value, on the admin port, narrowed by labels that the query keeps and by fixed words."""
    wanted = {label: f"${{__field.labels.{label}}}" for label in labels} | fixed | {"since": "${__from:date:iso}"}
    return Link("Sessions on the admin port", "${admin}/sessions?" + _asked(wanted))


def dead_letters_link(*labels: str, **fixed: str) -> Link:
    """The dead letters behind a value, likewise."""
    wanted = {"status": "pending"} | {label: f"${{__field.labels.{label}}}" for label in labels} | fixed
    return Link("Dead letters on the admin port", "${admin}/dlq?" + _asked(wanted))


def _asked(wanted: Mapping[str, str]) -> str:
    return "&".join(f"{name}={value}" for name, value in wanted.items())


def traces_link(condition: str) -> Link:
    """Explore with the traces that fulfil a TraceQL condition. Grafana's variables stay readable for Grafana."""
    pane = (
        '{"sidecar":{"datasource":"${traces}","queries":[{"refId":"A","queryType":"traceql","limit":20,'
        '"datasource":{"type":"tempo","uid":"${traces}"},"query":' + _json_text(f"{{ {condition} }}") + "}],"
        '"range":{"from":"${__from}","to":"${__to}"}}}'
    )
    return Link("Traces", "/explore?schemaVersion=1&panes=" + quote(pane, safe="${}_.:,"))


def _json_text(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'
