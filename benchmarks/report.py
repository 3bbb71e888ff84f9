"""What a run says: rows with a verdict, a table for people, a file for machines.

A row compares Sidecar with Envoy, set up as `envoy_with` says, or with a fixed limit. The file names figures, versions
and the number of cores; it never names the machine or a path.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.load import Sample

Verdict = Literal["OK", "MISSED", "UNCLEAR", ""]
NOISE_WORTH_SAYING = 0.05


@dataclass(frozen=True)
class Must:
    """A bound on a row: on the ratio to Envoy, or on Sidecar's own figure."""

    on: Literal["ratio", "sidecar"]
    direction: Literal["at least", "at most"]
    bound: float

    def met_by(self, value: float) -> bool:
        return value >= self.bound if self.direction == "at least" else value <= self.bound

    def __str__(self) -> str:
        sign = "≥" if self.direction == "at least" else "≤"
        return f"{sign} {self.bound:g}{' ×' if self.on == 'ratio' else ''}"


@dataclass(frozen=True)
class Row:
    """One line of the table. `samples` are the single rounds behind the medians, by peer."""

    scenario: str
    unit: str
    sidecar: float | None
    envoy: float | None
    direct: float | None
    must: Must | None
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    envoy_with: str = ""

    @property
    def ratio(self) -> float | None:
        if self.sidecar is None or self.envoy is None or self.envoy <= 0:
            return None
        return self.sidecar / self.envoy

    @property
    def verdict(self) -> Verdict:
        if self.must is None:
            return ""
        value = self.ratio if self.must.on == "ratio" else self.sidecar
        if value is None:
            return "UNCLEAR"
        return "OK" if self.must.met_by(value) else "MISSED"


def median_row(
    scenario: str, unit: str, must: Must | None, by_peer: Mapping[str, Sequence[Sample]], envoy_with: str = ""
) -> Row:
    """A row of medians over the rounds of each peer that took part."""
    values = {peer: [sample.value for sample in taken] for peer, taken in by_peer.items()}
    return _of_medians(scenario, unit, must, values, envoy_with)


def cpu_row(scenario: str, by_peer: Mapping[str, Sequence[Sample]], envoy_with: str = "") -> Row:
    """What a request cost each proxy's core in the same rounds: other work on the machine hardly touches it."""
    values = {
        peer: [sample.cpu_microseconds for sample in taken if sample.cpu_microseconds is not None]
        for peer, taken in by_peer.items()
        if peer != "direct"
    }
    return _of_medians(f"{scenario}: CPU", "µs/request", None, values, envoy_with)


def _of_medians(
    scenario: str, unit: str, must: Must | None, by_peer: Mapping[str, Sequence[float]], envoy_with: str
) -> Row:
    samples = {peer: values for peer, values in by_peer.items() if values}
    medians = {peer: statistics.median(values) for peer, values in samples.items()}
    figures = (medians.get("sidecar"), medians.get("envoy"), medians.get("direct"))
    return Row(scenario, unit, *figures, must, samples, envoy_with)


def table(rows: Sequence[Row]) -> str:
    heading = ("scenario", "sidecar", "envoy", "direct", "ratio", "must", "verdict", "envoy with")
    cells = [heading] + [
        (
            f"{row.scenario}, {row.unit}",
            _figure(row.sidecar),
            _figure(row.envoy),
            _figure(row.direct),
            "–" if row.ratio is None else f"{row.ratio:.2f}",
            str(row.must or "–"),
            row.verdict or "–",
            row.envoy_with or "–",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heading))]
    lines = [
        "  ".join(
            cell.ljust(width) if column in (0, 6, 7) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def noise_line(shares: Sequence[float]) -> str:
    """How much of the proxies' core went to somebody else, in words."""
    if not shares:
        return "Noise: not measured."
    middle, worst = statistics.median(shares), max(shares)
    line = f"Noise: other work took {middle:.1%} of the proxies' core in a typical round, {worst:.1%} at worst."
    if middle > NOISE_WORTH_SAYING:
        line += " That is a lot: run again on a quieter machine before believing a verdict."
    return line


def write_results(
    path: Path,
    rows: Sequence[Row],
    *,
    profile: str,
    date: str,
    cores: int,
    versions: Mapping[str, str],
    noise: Sequence[float],
    complaints: Sequence[str],
) -> None:
    document = {
        "date": date,
        "profile": profile,
        "cores": cores,
        "versions": dict(versions),
        "noise": {
            "median": round(statistics.median(noise), 4) if noise else None,
            "worst": round(max(noise), 4) if noise else None,
        },
        "scenarios": [_as_data(row) for row in rows],
        "complaints": list(complaints),
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _as_data(row: Row) -> dict[str, object]:
    return {
        "scenario": row.scenario,
        "unit": row.unit,
        "sidecar": _rounded(row.sidecar),
        "envoy": _rounded(row.envoy),
        "direct": _rounded(row.direct),
        "ratio": _rounded(row.ratio),
        "must": str(row.must) if row.must else None,
        "verdict": row.verdict or None,
        "envoy_with": row.envoy_with or None,
        "rounds": {peer: [_rounded(value) for value in values] for peer, values in row.samples.items()},
    }


def _rounded(value: float | None) -> float | None:
    if value is None:
        return None
    return round(value, 3) if abs(value) < 100 else round(value)


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
