"""What a panel of a dashboard is about to show: numbers as a person reads them, names and colours of its series.

Law: knows nothing of matplotlib. Colours, names and units come from the dashboard's JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.doubles.prometheus import Series, named

Json = dict[str, Any]
PALETTE = "#73bf69 #f2cc0c #5794f2 #ff9830 #b877d9 #f2495c #8ab8ff #fade2a #96d98d #ffb357 #ca95e5 #e0b400".split()
NAMED = {
    "green": "#73bf69", "light-green": "#96d98d", "red": "#f2495c", "dark-red": "#c4162a", "orange": "#ff9830",
    "dark-orange": "#fa6400", "yellow": "#fade2a", "blue": "#5794f2", "light-blue": "#8ab8ff",
    "super-light-blue": "#c0d8ff", "purple": "#b877d9",
}  # fmt: skip


def color(name: str) -> str:
    return NAMED.get(name, name)


def shown(value: float, unit: str) -> str:
    """A number as a person reads it."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %" if value < 10 else f"{value * 100:.0f} %"
    if unit == "s":
        if value < 0.001:
            return f"{value * 1e6:.3g} µs"
        if value < 1:
            return f"{value * 1000:.3g} ms"
        for length, word in ((86400, "d"), (3600, "h"), (120, "min")):
            if value >= length:
                return f"{value / (60 if word == 'min' else length):.3g} {word}"
        return f"{value:.3g} s"
    if unit in ("bytes", "Bps"):
        for word in ("B", "KiB", "MiB", "GiB", "TiB"):
            if value < 1024 or word == "TiB":
                return f"{value:.3g} {word}" + ("/s" if unit == "Bps" else "")
            value /= 1024
    after = {"reqps": " req/s", "ops": " /s"}.get(unit, "")
    return f"{value:.0f}{after}" if value >= 100 or value == int(value) else f"{value:.3g}{after}"


def legend(target: Json, series: Series) -> str:
    text = target["legendFormat"]
    if text == "__auto":
        return " ".join(series.labels.values())
    return named(text, series)


class Drawn:
    """One panel: its JSON, its answers (per target), the time they span and the moment of single numbers."""

    def __init__(
        self, panel: Json, answers: Sequence[Sequence[Series]], began: float, phases: Json, now: float
    ) -> None:
        self.panel = panel
        self.defaults = panel["fieldConfig"]["defaults"]
        self.unit = self.defaults["unit"]
        self.began = began
        self.phases = phases
        self.now = now
        self.answers = answers
        self.lines = [
            (legend(target, each), each)
            for target, found in zip(panel["targets"], answers, strict=True)
            for each in found
        ]

    def fixed(self, name: str, place: int) -> str:
        for override in self.panel["fieldConfig"]["overrides"]:
            kind, wanted = override["matcher"]["id"], override["matcher"]["options"]
            if wanted == name or (kind == "byRegexp" and re.search(wanted.strip("/"), name)):
                for each in override["properties"]:
                    if each["id"] == "color":
                        return color(each["value"]["fixedColor"])
        return PALETTE[place % len(PALETTE)]

    def judged(self, value: float, steps: Sequence[Json] | None = None) -> str:
        chosen = "green"
        for step in steps or self.defaults["thresholds"]["steps"]:
            if step["value"] is None or value >= step["value"]:
                chosen = step["color"]
        return color(chosen)

    def seconds(self, series: Series) -> list[float]:
        return [at - self.began for at, _ in series.points]

    def broken(self, series: Series) -> tuple[list[float], list[float]]:
        """Times and values with a hole wherever a second is missing: a gap stays a gap."""
        moments, values = [], []
        for moment, value in zip(self.seconds(series), series.values, strict=True):
            if moments and moment - moments[-1] > 1.5:
                moments.append(moment)
                values.append(float("nan"))
            moments.append(moment)
            values.append(value)
        return moments, values
