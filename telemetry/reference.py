"""The reference of what can be seen, as the README shows it.

Law: made from telemetry/names.py and nothing else, so it cannot say anything that is not so.
"""

from __future__ import annotations

from telemetry.names import CATALOGUE


def metrics_table() -> str:
    """A Markdown table of every metric."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in CATALOGUE:
        kind = "histogram with exemplars" if metric.exemplars else metric.kind
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        rows.append(f"| `{metric.exposed}` | {kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"
