"""The dashboards in Grafana's own eyes: the types and the code that Grafana publishes on npm, from 10.4 to 13.2.

`make dashboards-grafana` fetches the packages (about 250 MB, which is why `make test` does not) and runs this. Where they
are there already, for example after that, `make test` runs it too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.test_dashboards_names import FOLDER

CHECK = FOLDER / "grafana" / "check.mjs"
Json = dict[str, Any]
pytestmark = pytest.mark.timeout(180)


def judged(folder: Path) -> subprocess.CompletedProcess[str]:
    node = shutil.which("node")
    if node is None or not (FOLDER / "grafana" / "node_modules" / ".package-lock.json").is_file():
        pytest.skip("not run: Grafana's packages are not installed; `make dashboards-grafana` fetches them from npm")
    return subprocess.run([node, CHECK, folder], capture_output=True, text=True, check=False)


def test_grafana_knows_every_key_and_shows_tables_units_colours_and_words_as_meant() -> None:
    done = judged(FOLDER)
    assert (0, "") == (done.returncode, done.stderr), done.stdout
    assert "4 dashboards: the types of Grafana 10.4, 11.6, 12.4, 13.2 know every key" in done.stdout


def first(board: Json, kind: str) -> Json:
    found: Json = next(panel for panel in board["panels"] if panel["type"] == kind)
    return found


def test_mistakes_would_be_found(tmp_path: Path) -> None:
    board = json.loads((FOLDER / "sidecar-overview.json").read_text(encoding="utf-8"))
    first(board, "timeseries")["fieldConfig"]["defaults"]["custom"]["drawStyle"] = "lines"
    number = first(board, "stat")
    number["options"]["textmode"] = "auto"
    number["fieldConfig"]["defaults"]["unit"] = "req/s"
    del first(board, "table")["transformations"][1]["options"]["renameByName"]["Value #B"]
    (tmp_path / "sidecar-overview.json").write_text(json.dumps(board))
    done = judged(tmp_path)
    assert 1 == done.returncode
    for complaint in (
        "Raw vs app-visible success rate: Type '\"lines\"' is not assignable",
        "App-visible success rate: Object literal may only specify known properties, and '\"textmode\"' does not exist",
        "App-visible success rate has the unit req/s, which is none of Grafana's",
        "shows the columns Upstream,Requests/s,Value #B",
    ):
        assert complaint in done.stdout, done.stdout + done.stderr
