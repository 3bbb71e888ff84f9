"""Every panel asked in the states a dashboard gets to see: no traffic, one upstream, fifty, a restart, no job label.

The history is made by the product's own metrics, written with chosen times and loaded into a real Prometheus, so
nothing is waited for. Where there is traffic every panel has data; nowhere is there a NaN or an infinity.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dashboards.promql import filled
from telemetry import names
from telemetry.live import LiveBreaker, LiveDeadLetters, LiveUpstream, families
from telemetry.metrics import Metrics
from telemetry.record import SENT, Attempt, Session
from tests.doubles.prometheus import Prometheus, Series, named, promtool
from tests.test_dashboards_names import FOLDER, panel_expressions

STEP = 15.0
SCRAPES = 24
ASKED = {where: expr for where, expr in panel_expressions().items() if "variable" not in where}
pytestmark = pytest.mark.timeout(180)


class Scene:
    """A sidecar's metrics and what would be alive in it. `go_on` is what happens between two scrapes."""

    def __init__(self, upstreams: int, began: float) -> None:
        self.labels = [f"up{number}" for number in range(upstreams)]
        self.metrics = Metrics("0.1.0", "abc", self.labels)
        self.metrics.live = lambda: families(self)
        self.metrics.config_read(began)
        for part in ("dlq", "idempotency", "outbox"):
            self.metrics.stored.begin(part)
        self.began = self.now = began
        self.waiting = 0
        self.scrapes = 0

    # ---- what telemetry/live.py asks for ---------------------------------------------------------------------------

    def upstreams(self) -> Iterator[LiveUpstream]:
        state = ("closed", "open", "half_open")[self.scrapes // 5 % 3] if self.waiting else "closed"
        changed = self.now - 20 if self.waiting else None
        for label in self.labels:
            yield LiveUpstream(
                label=label,
                in_flight=3,
                active=2,
                idle=1,
                connects={"success": 5 * self.waiting, "failure": self.waiting},
                tls_unverified=bool(self.waiting),
                budget_left=0.4,
                gate_waiting=1,
                gate_pauses=self.waiting,
                breakers=(LiveBreaker("http://e:1", state, 0.3, changed),),
            )

    def ready(self) -> bool:
        return True

    def downstream_connections(self) -> int:
        return 7

    def keeps(self) -> bool | None:
        return True

    def incomplete(self) -> bool:
        return False

    def memory(self) -> tuple[dict[str, int], int, int]:
        return {"bodies": 1, "answers": 2, "unwritten": 3}, 4, 5

    def label_overflows(self) -> int:
        return self.waiting

    def dead_letters(self) -> LiveDeadLetters:
        oldest = self.now - 500 if self.waiting else None
        return LiveDeadLetters(
            dict.fromkeys(self.labels, (self.waiting, oldest)), 1000 * self.waiting, 10_000_000, 10**10
        )

    def outbox_jobs(self) -> Mapping[str, int]:
        return {"in_progress": 1, "unknown": 0}

    # ---- what happens ----------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Ten calls to each upstream: eight at once, one after a retry, one not at all; and some of everything else."""
        self.waiting += 1
        for label in self.labels:
            for _ in range(8):
                self.metrics.observe(self._session(label, "first_try", ["first"]))
            self.metrics.observe(self._session(label, "recovered", ["first", "retry"], "BAD_GATEWAY"))
            lost = self._session(label, "exhausted", ["first", "retry"], "BAD_GATEWAY", last="BAD_GATEWAY")
            lost.suppressed = "attempts"
            lost.caller_resend = True
            self.metrics.observe(lost)
            tunnel = self._session(label, "tunnelled", ["first"])
            tunnel.method = "CONNECT"
            self.metrics.observe(tunnel)
            self.metrics.observe(self._session(label, "first_try", ["first"], probe=True))
            self.metrics.breaker_moved(label, "http://e:1", "closed", "open")
            self.metrics.connection_wait(label, 0.001)
            self.metrics.stored.dead_lettered(label, "BAD_GATEWAY")
            self.metrics.stored.dead_letter_replayed(label, "completed")
            self.metrics.stored.delivered(label, "delivered")
            self.metrics.demotions[label] += 1
        self.metrics.stored.written(0.002)
        self.metrics.stored.looked_up("hit")
        self.metrics.loop_lag(0.0002)
        self.metrics.denied("NO_ROUTE")
        self.metrics.malformed("MALFORMED_REQUEST")
        self.metrics.tls_client_errors["bad_hello"] += 1
        self.metrics.spans["exported"] += 3
        self.metrics.exported("traces", True, self.now)
        self.metrics.config_reloaded(True, self.now)
        self.metrics.queue = lambda: (5, 8192)

    def _session(
        self, label: str, outcome: str, kinds: list[str], failed: str = "", last: str = "", probe: bool = False
    ) -> Session:
        session = Session(b"s", "GET", "/", 0.0)
        session.upstream, session.outcome, session.operation = label, outcome, "charge"
        session.status = 502 if last else 200
        session.request_bytes, session.response_bytes = 10, 100
        at = 0.001
        for number, kind in enumerate(kinds):
            attempt = Attempt(kind, "http://e:1", at)
            attempt.delay = 0.05 * number
            attempt.ended = at = at + 0.02
            attempt.phase = SENT
            attempt.code = (failed or None) if number < len(kinds) - 1 else (last or None)
            attempt.breaker = "half_open" if probe else "closed"
            session.attempts.append(attempt)
        session.ended = at + 0.06 * (len(kinds) - 1) + 0.0005
        return session

    def scrape(self, at: float, labels: str) -> Iterator[str]:
        """The page at a moment, with the labels that Prometheus would add."""
        self.now = at
        self.scrapes += 1
        _, slices = self.metrics.render("application/openmetrics-text; version=1.0.0")
        for line in b"".join(slices).decode().splitlines():
            if found := re.match(r"([a-z]\w*)(?:\{(.*?)\})? (\S+)(?: #.*)?$", line):
                both = ",".join(filter(None, (found[2], labels)))
                # The history is older than the process that makes it up.
                value = str(self.began) if found[1] == "process_start_time_seconds" else found[3]
                yield f"{found[1]}{{{both}}} {value} {at}\n"


class State:
    """A sidecar's history: there is traffic before the first `busy` scrapes."""

    def __init__(
        self,
        name: str,
        upstreams: int = 1,
        *,
        busy: int = SCRAPES,
        restart: bool = False,
        jobless: bool = False,
    ) -> None:
        self.name = name
        self.count = upstreams
        self.busy = busy
        self.restart = restart
        self.jobless = jobless

    def history(self, began: float) -> Iterator[str]:
        scene = Scene(self.count, began)
        labels = f'instance="{self.name}:1"' + ("" if self.jobless else f',job="{self.name}"')
        for number in range(SCRAPES):
            if self.restart and number == SCRAPES // 2:
                scene = Scene(self.count, began + number * STEP)
            if number < self.busy:
                scene.go_on()
            yield from scene.scrape(began + number * STEP, labels)

    def asked(self, expr: str) -> str:
        job = ".*" if self.jobless else self.name
        return filled(expr, job=job, instance=f"{self.name}:1", span="6m")


IDLE = State("idle", busy=0)
QUIET = State("quiet", busy=SCRAPES // 4)  # there was traffic, and for the last minutes none
ONE = State("one")
FIFTY = State("fifty", 50)
RESTARTED = State("restarted", restart=True)
JOBLESS = State("jobless", jobless=True)
STATES = (IDLE, QUIET, ONE, FIFTY, RESTARTED, JOBLESS)
WITH_TRAFFIC = (ONE, FIFTY, RESTARTED, JOBLESS)
every_state = pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
every_busy_state = pytest.mark.parametrize("state", WITH_TRAFFIC, ids=lambda state: state.name)


class History:
    """All states in one Prometheus, told apart by their instance."""

    def __init__(self, folder: Path) -> None:
        self.began = float(int(time.time()) - 3600)
        self.ended = self.began + (SCRAPES - 1) * STEP
        with (folder / "history.txt").open("w") as file:
            for state in STATES:
                file.writelines(state.history(self.began))
            file.write("# EOF\n")
        done = promtool("tsdb", "create-blocks-from", "openmetrics", "-q", folder / "history.txt", folder / "data")
        assert 0 == done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
        self.prometheus = Prometheus(folder, interval="1m")

    def over(self, state: State, expr: str) -> list[Series]:
        return self.prometheus.over(state.asked(expr), self.began + 60, self.ended, STEP)

    def end(self, state: State, expr: str) -> list[Series]:
        return self.prometheus.now(state.asked(expr), self.ended)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    made = History(tmp_path_factory.mktemp("history"))
    yield made
    made.prometheus.stop()


@every_state
def test_no_panel_shows_nan_or_infinity(history: History, state: State) -> None:
    for where, expr in ASKED.items():
        for series in history.over(state, expr) + history.end(state, expr):
            assert [] == series.artefacts, f"{where} {series.labels}"


@pytest.mark.parametrize(
    ("title", "guard"), [("App-visible success rate", " > 0)"), ("p99 app-visible latency", " >= 0")]
)
def test_without_its_guard_a_panel_would_show_nan(history: History, title: str, guard: str) -> None:
    expr = expr_of(title)
    assert guard in expr
    [series] = history.end(QUIET, expr.replace(guard, ")" if guard.endswith(")") else ""))
    assert 1 == len(series.artefacts)


@every_busy_state
def test_every_panel_has_data_where_there_is_traffic(history: History, state: State) -> None:
    empty = [where for where, expr in ASKED.items() if not history.over(state, expr)]
    assert [] == empty


@every_busy_state
def test_no_panel_mixes_two_series_into_one(history: History, state: State) -> None:
    """A legend that leaves out a label draws several lines with one name."""
    for path in sorted(FOLDER.glob("sidecar-*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                if target["legendFormat"] == "__auto":
                    continue
                drawn = [named(target["legendFormat"], each) for each in history.over(state, target["expr"])]
                assert len(drawn) == len(set(drawn)), f"{panel['title']}: {drawn[:3]}"


@every_state
def test_rates_and_shares_are_where_they_belong(history: History, state: State) -> None:
    """A restart would show as a negative rate, a wrong denominator as a share over 1."""
    for path in sorted(FOLDER.glob("sidecar-*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
            for target in panel.get("targets", ()):
                for series in history.over(state, target["expr"]):
                    assert min(series.values) >= 0, panel["title"]
                    if unit == "percentunit" and panel["title"] != "Load amplification":
                        assert max(series.values) <= 1.0000001, panel["title"]


def expr_of(title: str, ref: str = "A") -> str:
    [found] = {expr for where, expr in ASKED.items() if where.endswith(f": {title} {ref}")}
    return found


def last(series: list[Series]) -> float:
    [only] = series
    return only.values[-1]


@every_busy_state
def test_the_key_panels_have_the_values_that_the_history_implies(history: History, state: State) -> None:
    # Of twelve calls to an upstream ten were answered at once, one after a retry, one not at all.
    assert 11 / 12 == pytest.approx(last(history.end(state, expr_of("App-visible success rate"))))
    assert 10 / 12 == pytest.approx(last(history.end(state, expr_of("Raw vs app-visible success rate"))))
    assert 14 / 12 == pytest.approx(last(history.end(state, expr_of("Load amplification"))))
    assert 0.5 == pytest.approx(last(history.end(state, expr_of("Retry success rate"))))
    assert 12 * state.count / STEP == pytest.approx(last(history.end(state, expr_of("Requests/s"))))
    assert 500 == pytest.approx(last(history.end(state, expr_of("Oldest entry"))), abs=1)


def test_without_traffic_there_is_no_success_rate_and_not_a_wrong_one(history: History) -> None:
    for title in ("App-visible success rate", "Load amplification", "Retry success rate", "p99 app-visible latency"):
        assert [] == history.end(IDLE, expr_of(title))
        assert [] == history.end(QUIET, expr_of(title))
    assert 0 == last(history.end(IDLE, expr_of("Requests/s")))
    assert 0 == last(history.end(IDLE, expr_of("Breakers open")))


def test_a_table_has_a_line_for_each_of_fifty_upstreams(history: History) -> None:
    title = "Upstreams: rate, error ratio, latency, breakers, dead letters"
    for ref in "ABCDEF":
        assert 50 == len(history.end(FIFTY, expr_of(title, ref)))


def test_fifty_upstreams_stay_within_the_series_they_may_cost(history: History) -> None:
    [series] = history.prometheus.now('count({instance="fifty:1",upstream=~".+"})', history.ended)
    assert series.values[0] / 50 <= 250


def test_the_variables_of_the_dashboards_find_their_values(history: History) -> None:
    status, text = history.prometheus.get("/api/v1/label/upstream/values?match[]=sidecar_sessions_total")
    assert 200 == status
    assert {f"up{number}" for number in range(50)} <= set(json.loads(text)["data"])
    _, text = history.prometheus.get("/api/v1/label/instance/values?match[]=sidecar_build_info")
    assert {f"{state.name}:1" for state in STATES} == set(json.loads(text)["data"])


def test_every_metric_of_the_catalogue_is_in_the_history(history: History) -> None:
    """So that a panel with data has it from the metric, and not from nothing being asked."""
    _, text = history.prometheus.get("/api/v1/label/__name__/values")
    there = set(json.loads(text)["data"])
    missing = [
        what.exposed for what in names.CATALOGUE if what.exposed not in there and f"{what.name}_bucket" not in there
    ]
    assert [] == missing
