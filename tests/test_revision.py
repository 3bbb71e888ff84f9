"""Which revision is running: said by the image, or read off the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.revision import revision
from tests.conftest import Starter

ONE, OTHER = "1" * 40, "2" * 40


def written(top: Path, **files: str) -> Path:
    for name, text in files.items():
        path = top / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


@pytest.mark.parametrize(
    ("expected", "files"),
    [
        (ONE, {"_dot_git__HEAD": "ref: refs/heads/main\n", "_dot_git__refs__heads__main": ONE + "\n"}),
        (OTHER, {"_dot_git__HEAD": OTHER + "\n"}),
        (
            ONE,
            {"_dot_git__HEAD": "ref: refs/heads/main\n", "_dot_git__packed-refs": f"# pack\n{ONE} refs/heads/main\n"},
        ),
        ("", {"_dot_git__HEAD": "ref: refs/heads/none\n"}),
        ("", {"_dot_git__HEAD": "odd\n"}),
        ("", {}),
        (
            ONE,
            {
                "_dot_git": "gitdir: far/away\n",
                "far__away__HEAD": "ref: refs/heads/b\n",
                "far__away__commondir": "../..\n",
                "refs__heads__b": ONE,
            },
        ),
    ],
)
def test_a_checkout_says_on_which_commit_it_stands(tmp_path: Path, expected: str, files: dict[str, str]) -> None:
    assert expected[:12] == revision({}, written(tmp_path, **files))


def test_what_an_image_was_told_goes_first(tmp_path: Path) -> None:
    top = written(tmp_path, _dot_git__HEAD=OTHER)
    assert "v7" == revision({"SIDECAR_REVISION": " v7 "}, top)
    assert OTHER[:12] == revision({"SIDECAR_REVISION": OTHER}, top)
    assert 40 == len(revision({"SIDECAR_REVISION": "x" * 1000}, top))


async def test_it_is_in_the_metric_that_says_what_is_running(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    labels = {"version": sidecar.proxy.metrics.version, "revision": sidecar.proxy.metrics.revision}
    assert revision({}) == labels["revision"]
