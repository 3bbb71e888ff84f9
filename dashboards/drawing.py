"""A dashboard drawn with matplotlib: an approximation of what Grafana would show, from the same queries and layout.

Law: draws only what it is given. Numbers, colours, legends and places come from the dashboard's JSON.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

from dashboards.drawn import Drawn, Json, color, shown

BACKGROUND, CARD, TEXT, FAINT = "#111217", "#181b1f", "#d0d2d8", "#6b6f76"
UNIT, GAP = 0.34, 0.12
"""Inches for one step of Grafana's grid, and between panels."""
PHASES = {"errors": "#ff9830", "down": "#f2495c", "recovering": "#5794f2", "replay": "#b877d9"}
"""What tints the time of each phase, faintly; well is not tinted."""


def _number(at: Axes, drawn: Drawn) -> None:
    at.axis("off")
    if not drawn.lines:
        at.text(0.5, 0.45, drawn.defaults.get("noValue", "no data"), color=FAINT, ha="center", va="center", fontsize=12)
        return
    drawn.lines[:] = drawn.lines[:3]
    mappings = {key: word["text"] for each in drawn.defaults["mappings"] for key, word in each["options"].items()}
    filled = drawn.panel["options"].get("colorMode") == "background"
    if filled:
        worst = drawn.judged(drawn.lines[0][1].values[-1])
        at.add_patch(plt.Rectangle((0, 0), 1, 1, transform=at.transAxes, facecolor=worst, alpha=0.75, linewidth=0))
    for place, (name, series) in enumerate(drawn.lines):
        value = series.values[-1]
        text = mappings.get(f"{value:g}", shown(value, drawn.unit))
        if drawn.panel["options"].get("textMode") == "value_and_name" or len(drawn.lines) > 1:
            text = f"{name}: {text}"
        size = 20 if len(drawn.lines) == 1 and len(text) < 10 else 11
        height = 0.5 + 0.22 * ((len(drawn.lines) - 1) / 2 - place)
        tint = "white" if filled else drawn.judged(value)
        at.text(0.5, height, text, color=tint, ha="center", va="center", fontsize=size, weight="bold")
    if drawn.panel["type"] == "gauge":
        value = drawn.lines[0][1].values[-1]
        at.barh([0.14, 0.14], [1, value], left=0, height=0.08, color=["#2c3036", drawn.judged(value)])
        at.set(xlim=(-0.1, 1.1), ylim=(0, 1))


def _lines(at: Axes, drawn: Drawn) -> None:
    custom = drawn.defaults["custom"]
    # A line that is never more than zero keeps its place and loses its name, or the names would hide the rest.
    names = [name if max(series.values) > 0 else f"_{name}" for name, series in drawn.lines]
    if custom["stacking"]["mode"] == "normal" and drawn.lines:
        moments = sorted({moment for _, series in drawn.lines for moment in drawn.seconds(series)})
        heights = []
        for _, series in drawn.lines:
            known = dict(zip(drawn.seconds(series), series.values, strict=True))
            heights.append([known.get(moment, 0.0) for moment in moments])
        fills = [drawn.fixed(name.lstrip("_"), place) for place, name in enumerate(names)]
        at.stackplot(moments, heights, colors=fills, alpha=0.75, linewidth=0, labels=names)
    else:
        for place, (name, (_, series)) in enumerate(zip(names, drawn.lines, strict=True)):
            chosen = drawn.fixed(name.lstrip("_"), place)
            if custom["drawStyle"] == "bars":
                at.bar(drawn.seconds(series), series.values, width=0.8, color=chosen, alpha=0.7, label=name)
            else:
                at.plot(*drawn.broken(series), color=chosen, linewidth=1.3, marker=".", markersize=2, label=name)
    if custom["thresholdsStyle"]["mode"] != "off":
        for step in drawn.defaults["thresholds"]["steps"][1:]:
            if step["value"] <= at.get_ylim()[1]:
                at.axhline(step["value"], color=color(step["color"]), linestyle="--", linewidth=0.8)
    at.set_ylim(0, at.get_ylim()[1] * 1.05)
    at.yaxis.set_major_locator(plt.MaxNLocator(5))
    if all(name.startswith("_") for name in names) and names:
        at.set_ylim(top=1)
    if "max" in drawn.defaults:
        at.set_ylim(top=drawn.defaults["max"] * 1.05)
    at.yaxis.set_major_formatter(lambda value, _: shown(value, drawn.unit))
    _keys(at, [name for name in names if not name.startswith("_")])


def _keys(at: Axes, names: Sequence[str]) -> None:
    """The legend, in as many columns as its longest name leaves room for."""
    if names:
        inches = at.get_position().width * at.figure.get_size_inches()[0]
        columns = max(1, min(6, int(inches / (0.35 + 0.063 * max(map(len, names))))))
        at.legend(
            loc="upper left", bbox_to_anchor=(0, -0.17), ncols=columns, fontsize=7.5, frameon=False, labelcolor=TEXT,
            handlelength=1, columnspacing=1, borderaxespad=0,
        )  # fmt: skip


def _states(at: Axes, drawn: Drawn) -> None:
    words = drawn.defaults["mappings"][0]["options"]
    for place, (_, series) in enumerate(drawn.lines):
        for moment, value in zip(drawn.seconds(series), series.values, strict=True):
            at.barh(place, 1.02, left=moment, height=0.7, color=color(words[f"{value:g}"]["color"]), linewidth=0)
        name = drawn.lines[place][0].split(" (")[0]
        at.text(0.5, place, f" {name}", color="black", fontsize=8, va="center")
    at.set_yticks([])
    for word in words.values():
        at.barh(0, 0, color=color(word["color"]), label=word["text"])
    _keys(at, [word["text"] for word in words.values()])


def _heat(at: Axes, drawn: Drawn) -> None:
    rows = sorted((float(series.labels["le"]), series) for _, series in drawn.lines)
    before: dict[float, float] = {}
    for place, (_, series) in enumerate(rows):
        here = dict(zip(drawn.seconds(series), series.values, strict=True))
        for moment, value in here.items():
            share = max(0.0, value - before.get(moment, 0.0))
            if share > 0:
                at.barh(
                    place, 1, left=moment, height=0.95, color="#ff9830", alpha=min(1.0, 0.15 + (share / 120) ** 0.5)
                )
        before = here
    at.set_yticks(range(len(rows)), [f"{bound:g}" for bound, _ in rows])


def _table(at: Axes, drawn: Drawn) -> None:
    at.axis("off")
    renamed = drawn.panel["transformations"][-1]["options"]["renameByName"]
    key = next(iter(renamed))
    rows: dict[str, dict[str, float]] = {}
    columns = [name for name in dict.fromkeys(renamed.values()) if name != renamed[key]]
    for column, found in zip(columns, drawn.answers, strict=True):
        for series in found:
            rows.setdefault(series.labels[key], {})[column] = series.values[-1]
    units = {
        override["matcher"]["options"]: {each["id"]: each["value"] for each in override["properties"]}
        for override in drawn.panel["fieldConfig"]["overrides"]
    }
    places = [0.01, *(0.25 + 0.75 * number / len(columns) for number in range(len(columns)))]
    for place, word in zip(places, [renamed[key], *columns], strict=True):
        at.text(place, 0.9, word, color=FAINT, fontsize=9, va="center")
    for line, (name, values) in enumerate(sorted(rows.items(), key=lambda row: -row[1].get(columns[0], 0))):
        height = 0.74 - 0.17 * line
        at.text(places[0], height, name, color="#6e9fff", fontsize=9.5, va="center")
        for place, column in zip(places[1:], columns, strict=True):
            value, looks = values.get(column), units[column]
            text = "–" if value is None else shown(value, looks["unit"])
            tint = (
                drawn.judged(value, looks["thresholds"]["steps"])
                if value is not None and "thresholds" in looks
                else TEXT
            )
            at.text(place, height, text, color=tint, fontsize=9.5, va="center")


def _bars(at: Axes, drawn: Drawn) -> None:
    at.axis("off")
    if not drawn.lines:
        at.text(0.5, 0.45, drawn.defaults["noValue"], color=FAINT, ha="center", va="center", fontsize=12)
        return
    longest = max(1.0, *(series.values[-1] for _, series in drawn.lines))
    at.set(xlim=(0, longest), ylim=(-0.5, len(drawn.lines)))
    for place, (name, series) in enumerate(reversed(drawn.lines)):
        value = series.values[-1]
        at.barh(place, value, left=longest * 0.55, height=0.5, color=drawn.judged(value))
        at.text(longest * 0.03, place, f"{name}: {shown(value, drawn.unit)}", color=TEXT, fontsize=8, va="center")


KINDS: dict[str, Callable[[Axes, Drawn], None]] = {
    "stat": _number, "gauge": _number, "timeseries": _lines, "state-timeline": _states, "heatmap": _heat,
    "table": _table, "bargauge": _bars,
}  # fmt: skip


def draw(board: Json, panels: Sequence[Drawn], caption: str, file: Path) -> None:
    """All panels where the dashboard has them, row headings included."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    width_in, height_in = 24 * UNIT * 1.9, height * UNIT + 0.7
    figure = plt.figure(figsize=(width_in, height_in), facecolor=BACKGROUND)
    figure.text(0.01, 1 - 0.22 / height_in, board["title"], color=TEXT, fontsize=16, weight="bold", va="center")
    figure.text(0.99, 1 - 0.22 / height_in, caption, color=FAINT, fontsize=8.5, va="center", ha="right")

    def box(place: Json, inner: float) -> tuple[float, float, float, float]:
        top = 1 - (0.45 + place["y"] * UNIT) / height_in
        left, high = place["x"] / 24, place["h"] * UNIT / height_in
        side, edge = inner / width_in, inner / height_in
        return left + side, top - high + edge, place["w"] / 24 - 2 * side, high - 2 * edge

    for panel in board["panels"]:
        if panel["type"] == "row":
            left, bottom, _, high = box(panel["gridPos"], 0)
            figure.text(left + 0.008, bottom + high / 2, panel["title"], color=TEXT, fontsize=11, va="center")
    for drawn in panels:
        left, bottom, wide, high = box(drawn.panel["gridPos"], GAP / 2)
        figure.add_artist(
            plt.Rectangle((left, bottom), wide, high, facecolor=CARD, transform=figure.transFigure, zorder=-1)
        )
        title = 0.26 / height_in
        figure.text(
            left + 0.005, bottom + high - title * 0.7, drawn.panel["title"], color=TEXT, fontsize=9, va="center"
        )
        if drawn.panel["type"] in ("stat", "gauge", "table", "bargauge"):
            at = figure.add_axes((left, bottom, wide, high - title), facecolor=CARD)
        else:
            at = figure.add_axes(
                (left + 0.05, bottom + 0.7 / height_in, wide - 0.06, high - title - 0.8 / height_in), facecolor=CARD
            )
            _axis(at, drawn)
        KINDS[drawn.panel["type"]](at, drawn)
    file.parent.mkdir(exist_ok=True)
    page = io.BytesIO()
    figure.savefig(page, dpi=100, facecolor=BACKGROUND)
    plt.close(figure)
    Image.open(page).convert("RGB").quantize(160).save(file, optimize=True)  # a third of the size


def _axis(at: Axes, drawn: Drawn) -> None:
    at.tick_params(colors="#9a9da4", labelsize=7.5, length=2)
    for side in at.spines.values():
        side.set_color("#2c3036")
    at.grid(color="#22252b", linewidth=0.5)
    at.set_axisbelow(True)
    end = max(ended for _, ended in drawn.phases.values()) - drawn.began
    at.set_xlim(0, end)
    for phase, (start, ended) in drawn.phases.items():
        if phase in PHASES:
            at.axvspan(start - drawn.began, ended - drawn.began, color=PHASES[phase], alpha=0.1, linewidth=0)
    at.axvline(drawn.now - drawn.began, color=TEXT, linestyle=":", linewidth=0.8)
    at.set_xticks([(start - drawn.began) for start, _ in drawn.phases.values()], list(drawn.phases), ha="left")
    if not drawn.lines:
        at.text(
            end / 2,
            0.5,
            "no data",
            color=FAINT,
            ha="center",
            va="center",
            fontsize=9,
            transform=at.get_xaxis_transform(),
        )
