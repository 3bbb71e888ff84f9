"""What README.md says can be seen is what is seen: the table comes from the code, the examples from a run."""

from __future__ import annotations

import pytest

from telemetry.names import CATALOGUE
from tests.e2e.examples import README, alike, between, sections

HOW = "run `python -m tests.e2e.examples`, which writes it anew"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return sections()


def test_the_table_of_metrics_is_the_one_in_the_code(made: dict[str, str]) -> None:
    shown = between(README.read_text(), "metrics")
    assert made["metrics"] == shown, HOW
    assert len(CATALOGUE) == shown.count("\n| `sidecar_")


@pytest.mark.parametrize("name", ["spans", "line", "explanation"])
def test_an_example_is_what_a_run_shows(made: dict[str, str], name: str) -> None:
    shown = between(README.read_text(), name)
    assert len(shown) > 100, "the markers are gone"
    assert alike(made[name]) == alike(shown), HOW


def test_what_differs_between_runs_is_all_that_is_left_out() -> None:
    first = '+1.2 ms  "trace_id": "0123abcd…", "duration_s": 0.25, "code": "NOT_FOUND", 404'
    assert alike(first) == alike('+13 s   "trace_id": "99999999…", "duration_s": 3e-05, "code": "NOT_FOUND", 404')
    assert alike(first) != alike(first.replace("404", "503"))
    assert alike(first) != alike(first.replace("NOT_FOUND", "CONFLICT"))
