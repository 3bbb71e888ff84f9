"""The layer harness: real connections without sockets, switches that are proved to be on the path."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.layers import LAYERS, Switch, _costs, nothing, switch_off
from benchmarks.line import Line, NotOnThePath
from benchmarks.peers import ROOT
from benchmarks.processes import clean_environment


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    made = Line(tmp_path)
    await made.connect()
    yield made
    made.close()


async def test_every_request_pushed_is_one_healthy_session_and_one_answer(line: Line) -> None:
    line.push(10)
    assert 12 == line.app.writes  # two were needed to get going
    assert {"first_try": 12} == +line.proxy.metrics.sessions_by_outcome()


@pytest.mark.parametrize("layer", LAYERS)
async def test_a_layer_that_is_off_is_not_called_and_requests_are_still_answered(layer: str, line: Line) -> None:
    switches = LAYERS[layer](line)
    switch_off(line, layer, switches)
    before = line.app.writes
    line.push(5)
    assert before + 5 == line.app.writes
    assert all(switch.instead is getattr(switch.owner, switch.name) for switch in switches)


async def test_without_metrics_nothing_is_counted_any_more(line: Line) -> None:
    switch_off(line, "metrics", LAYERS["metrics"](line))
    counted = line.proxy.metrics.sessions_by_outcome().total()
    line.push(5)
    assert counted == line.proxy.metrics.sessions_by_outcome().total()


async def test_a_switch_that_requests_do_not_use_is_found_out(line: Line) -> None:
    elsewhere = Switch(line.proxy, "drain", nothing)
    with pytest.raises(NotOnThePath, match="breaker: drain is not called"):
        switch_off(line, "breaker", [elsewhere])


async def test_a_switch_is_left_as_it_was_after_its_trial(line: Line) -> None:
    (switch,) = LAYERS["metrics"](line)
    real = switch.owner.observe
    assert 4 == switch.uses(lambda: line.push(4))
    assert real == switch.owner.observe


def test_a_cost_is_the_difference_to_the_request_without_the_layer() -> None:
    best = {"whole": 20.0, "everything": 15.0, **dict.fromkeys(LAYERS, 19.0)}
    best |= {"telemetry, nothing exported": 17.0, "1 %": 21.5, "100 %": 50.0}
    costs = _costs(best, 0.5)
    assert 20.0 == costs["whole request, in process"]
    assert 1.0 == costs["breaker"]
    assert 3.0 == costs["telemetry, nothing exported"]
    assert 4.5 == costs["telemetry, 1 % traced (aim ≤ 6)"]
    assert 33.0 == costs["telemetry, 100 % traced"]
    assert 15.0 == costs["all the rest (parse, route, relay, …)"]


def _run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-m", "benchmarks.layers", "--rounds", "1", "--requests", "50", *arguments]
    return subprocess.run(argv, cwd=ROOT, env=clean_environment(), capture_output=True, timeout=50, check=False)


def test_the_command_prints_every_layer() -> None:
    done = _run("--json")
    assert 0 == done.returncode, done.stderr.decode()
    costs = json.loads(done.stdout)
    assert set(LAYERS) < set(costs)
    assert 0 < costs["whole request, in process"]


class Taking(BaseHTTPRequestHandler):
    """A collector that takes everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None: ...


def test_with_a_receiver_the_price_of_traces_is_shown_too() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Taking) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        done = _run("--json", "--export-to", f"http://127.0.0.1:{receiver.server_port}")
        receiver.shutdown()
    assert 0 == done.returncode, done.stderr.decode()
    assert {"telemetry, 1 % traced (aim ≤ 6)", "telemetry, 100 % traced"} < set(json.loads(done.stdout))


def test_export_is_paid_for_only_when_it_arrives(unused_tcp_port_factory: Callable[[], int]) -> None:
    done = _run("--export-to", f"http://127.0.0.1:{unused_tcp_port_factory()}")
    assert 1 == done.returncode
    assert "the receiver did not get every span" in done.stderr.decode()
