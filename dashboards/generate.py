"""Writes the dashboards: `make dashboards`, or `python dashboards/generate.py`. With `--check` it only compares.

Law: the same code gives the same bytes. Python's standard library is all it needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))  # so that it can also be run as a file

from dashboards.boards.dead_letters import dead_letters  # noqa: E402 - needs the path set above
from dashboards.boards.internals import internals  # noqa: E402 - needs the path set above
from dashboards.boards.overview import overview  # noqa: E402 - needs the path set above
from dashboards.boards.resilience import resilience  # noqa: E402 - needs the path set above


def generated() -> dict[str, str]:
    """File name → its text."""
    boards = [overview(), resilience(), dead_letters(), internals()]
    return {f"{each['uid']}.json": json.dumps(each, indent=2, ensure_ascii=False) + "\n" for each in boards}


def stale(folder: Path) -> list[str]:
    """Files that are not what the code gives, left-over ones included."""
    wanted = generated()
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("sidecar-*.json")}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def main(arguments: Iterable[str], folder: Path = FOLDER) -> int:
    if "--check" in arguments:
        different = stale(folder)
        for name in different:
            print(f"dashboards/{name} is not what dashboards/generate.py gives; run `make dashboards`", file=sys.stderr)
        return 1 if different else 0
    wanted = generated()
    for name in stale(folder):
        if name in wanted:
            (folder / name).write_text(wanted[name], encoding="utf-8")
            print(f"wrote dashboards/{name}")
        else:
            (folder / name).unlink()
            print(f"removed dashboards/{name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
