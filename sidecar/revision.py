"""Which revision of the source is running, for `sidecar_build_info`.

Law: looked up once at the start, cheaply, and never a reason not to start. An image says it in SIDECAR_REVISION; a
checkout is asked for the commit it stands on, by its files, because git need not be there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "SIDECAR_REVISION"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LONGEST = 40
_ENOUGH = 12
"""Digits of a commit that are shown: as many as a person compares and a panel holds."""


def revision(environ: Mapping[str, str], top: Path = Path(__file__).parent.parent) -> str:
    """The commit, or whatever the image was told; empty when nobody knows."""
    said = environ.get(VARIABLE, "").strip()
    if said:
        return said[: _ENOUGH if _COMMIT.fullmatch(said) else _LONGEST]
    try:
        return _of_checkout(top / ".git")[:_ENOUGH]
    except (OSError, ValueError):
        return ""


def _of_checkout(place: Path) -> str:
    if place.is_file():  # a worktree: `gitdir: PATH`
        place = place.parent / place.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
    head = (place / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    shared = place / "commondir"
    common = place / shared.read_text(encoding="utf-8").strip() if shared.exists() else place
    for folder in (place, common):
        if (folder / name).is_file():
            found = (folder / name).read_text(encoding="utf-8").strip()
            return found if _COMMIT.fullmatch(found) else ""
    for line in (common / "packed-refs").read_text(encoding="utf-8").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name and _COMMIT.fullmatch(commit):
            return commit
    return ""
