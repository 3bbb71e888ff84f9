"""Pictures of the dashboards for people without a Grafana at hand: `make dashboards-preview`.

Law: every number comes from a panel's own query, asked of a real Prometheus that scraped a real sidecar through the
incident of incident.py. The pictures say so, and that they are no screenshots of Grafana.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))  # so that it can also be run as a file

from dashboards.drawing import draw  # noqa: E402 - needs the path set above
from dashboards.drawn import Drawn  # noqa: E402 - likewise
from dashboards.promql import filled  # noqa: E402 - likewise
from dashboards.rehearsal import LONGEST_BREAK, RATE_INTERVAL, Played, rehearsal  # noqa: E402 - likewise

SCRIPT = {"healthy": 20.0, "errors": 30.0, "down": 25.0, "recovering": 25.0, "replay": 25.0}
CAPTION = (
    "drawn with matplotlib from the panels' real queries on a real Prometheus; not a screenshot of Grafana. "
    "Single numbers are those at the dotted line"
)


def pictures(played: Played, folder: Path) -> list[str]:
    """Draws each dashboard; says which of its panels have no data."""
    said = []
    for path in sorted(FOLDER.glob("sidecar-*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        panels = [_asked(played, panel) for panel in board["panels"] if panel["type"] != "row"]
        empty = [drawn.panel["title"] for drawn in panels if not drawn.lines]
        draw(board, panels, CAPTION, folder / f"{path.stem}.png")
        said.append(f"drew {path.stem}.png" + (f" (no data: {', '.join(empty)})" if empty else ""))
    return said


def _asked(played: Played, panel: dict[str, object]) -> Drawn:
    targets: list[dict[str, str]] = panel["targets"]  # type: ignore[assignment]
    span = f"{int(played.ended - played.began)}s"
    answers = []
    for target in targets:
        expr = filled(target["expr"], rate_interval=RATE_INTERVAL, span=span)
        if target["instant"]:
            answers.append(played.prometheus.now(expr, _moment(played)))
        else:
            answers.append(played.prometheus.over(expr, played.began, played.ended, 1))
    return Drawn(panel, answers, played.began, played.phases, _moment(played))


def _moment(played: Played) -> float:
    """Of single numbers: soon after the replay began, when there is something to see."""
    return played.phases["replay"][0] + 3


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, rehearsal(Path(folder)) as played:
        played.watch(5)  # until the first windows are full
        for phase, seconds in SCRIPT.items():
            print(f"{phase} for {seconds:g} s", flush=True)
            played.play(phase, seconds)
        if played.stood_still() > LONGEST_BREAK:
            print("The machine stood still meanwhile, and the pictures would show that. Nothing drawn; run it again.")
            return 1
        for line in pictures(played, FOLDER / "preview"):
            print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
