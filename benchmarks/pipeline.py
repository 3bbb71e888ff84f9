"""What policies, telemetry and the store cost: scenarios in which both proxies do more than pass bytes on.

Sidecar is compared with an Envoy set up for the same job. That a proxy really exported is looked up at its receiver,
or the comparison would be with a proxy that does not.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.bench import QUICK, Bench, reverse_json, say
from benchmarks.durable import FILES, KEPT
from benchmarks.load import Sample, fetch
from benchmarks.outages import BOUNDS, SECONDS
from benchmarks.paced import BeforeAndAfter, even_rate, p99_around
from benchmarks.peers import ROOT, Aim, Pair, Peer, Receiver, export_environment
from benchmarks.processes import LOOPBACK, clean_environment
from benchmarks.report import Must, Row, cpu_row, median_row

OUTLIER = "retries, outliers"
COLLECTOR_SHARE_OF_PEAK = 0.25  # leaves room for the spans of every single request
EXPORT_SECONDS = 1.0  # how often and how patiently Sidecar exports while its collector is killed
RECOVERY_LIMIT_SECONDS = 15.0
ALONE_LIMIT_SECONDS = 300.0
LEAST_DEAD_LETTERS = 2000


def resilience(bench: Bench) -> list[Row]:
    """Policies, breaker, budget and record against retries and outlier detection."""
    pair = Pair(bench.cast.sidecar, bench.casting.envoy("envoy-outlier.yaml", "outlier detection"))
    what = "150-byte JSON, resilience"
    taken = bench.small_answers(what, pair.proxies, reverse_json)
    must = Must("ratio", "at least", 1.2)
    return [median_row(what, "requests/s", must, taken, OUTLIER), cpu_row(what, taken, OUTLIER)]


def telemetry(bench: Bench) -> list[Row]:
    """Everything on, a few of the requests traced, then all of them."""
    rows = []
    for percent, bound in ((1, 1.1), (100, 0.5)):
        what = f"150-byte JSON, {percent} % traced"
        pair, receivers = _traced_pair(bench, percent)
        taken = bench.small_answers(what, pair.proxies, reverse_json)
        for peer, receiver in zip(pair.proxies, receivers, strict=True):
            if not exports_received(receiver):
                bench.complaints.append(f"{what}, {peer.label}: nothing was exported, so this was not measured")
        envoy_with = f"{OUTLIER}, log, {percent} % traced"
        must = Must("ratio", "at least", bound)
        rows += [median_row(what, "requests/s", must, taken, envoy_with), cpu_row(what, taken, envoy_with)]
        rows.append(Row(f"spans delivered, {percent} % traced", "%", _delivered(pair.sidecar), None, None, None))
    return rows


def collector(bench: Bench) -> list[Row]:
    """The collector dies in the middle of a load: requests must not notice, and what is lost must be counted."""
    peak = bench.peak_rate()
    if peak < 1000:
        bench.complaints.append("collector: Sidecar has no usable peak rate, so there is no rate to measure at")
        return []
    rate = even_rate(peak * COLLECTOR_SHARE_OF_PEAK)
    return [row for percent in (1, 100) for row in _collector_killed(bench, percent, rate)]


def _collector_killed(bench: Bench, percent: int, rate: float) -> list[Row]:
    rounds, seconds = bench.profile.collector
    receiver = bench.casting.receiver()
    milliseconds = f"{EXPORT_SECONDS * 1000:.0f}"
    environ = export_environment(receiver.endpoint, percent / 100) | {
        "OTEL_BSP_SCHEDULE_DELAY": milliseconds,
        "OTEL_EXPORTER_OTLP_TIMEOUT": milliseconds,
    }
    peer = bench.casting.sidecar(f"collector killed, {percent} % traced", environ)
    log = bench.folder / "h2load.log"
    calm: list[BeforeAndAfter] = []
    killed: list[BeforeAndAfter] = []
    lost: list[Sample] = []
    for _ in range(rounds):
        if not receiver.running.alive:
            receiver = bench.casting.receiver(receiver.port)
        _wait_for_export(bench, peer)
        lost_before = _spans_lost(peer)
        # Nothing happens in the first run: how far its halves differ is how far they differ by themselves.
        for happening, runs in ((_nothing, calm), (partial(bench.casting.kill, receiver), killed)):
            sides = p99_around(reverse_json(peer), happening, rate=rate, seconds=seconds, log=log)
            for what, sample in (("first half", sides.before), ("second half", sides.after)):
                bench.count("collector", peer, sample)
                fate = "killed" if runs is killed else "up"
                bench.tell(f"p99, {percent} %, {fate}, {what}", peer, sample)
            runs.append(sides)
        _wait_for(partial(_more_lost, peer, lost_before))
        lost.append(Sample(float(_spans_lost(peer) - lost_before), 0))
    failed = sum(side.failed for run in (*calm, *killed) for side in (run.before, run.after))
    # One short run cannot judge a percentile.
    unchanged = None if bench.profile is QUICK else Must("sidecar", "at most", 1.5)
    named = f"{percent} % traced"
    return [
        median_row(f"p99 at {rate:,.0f} requests/s, {named}", "ms", None, {"sidecar": [run.before for run in killed]}),
        median_row(f"p99, collector killed, {named}", "ms", None, {"sidecar": [run.after for run in killed]}),
        median_row(f"p99 after ÷ p99 before, {named}", "×", unchanged, {"sidecar": _changes(killed)}),
        median_row("… when nothing is killed", "×", None, {"sidecar": _changes(calm)}),
        median_row(f"spans lost and counted, {named}", "spans", Must("sidecar", "at least", 1), {"sidecar": lost}),
        Row(f"failed, collector killed, {named}", "requests", float(failed), None, None, Must("sidecar", "at most", 0)),
    ]


def _nothing() -> None: ...


def _changes(runs: Sequence[BeforeAndAfter]) -> list[Sample]:
    return [Sample(run.after.value / run.before.value, 0) for run in runs if run.before.value]


def layers(bench: Bench) -> list[Row]:
    """What each layer costs a healthy request, in a process of its own on the proxies' core (`layers.py`)."""
    receiver = bench.casting.receiver()
    rounds, requests = bench.profile.layers
    argv = ["benchmarks.layers", "--export-to", receiver.endpoint]
    costs = _by_itself(bench, "layers", {bench.proxy_core}, *argv, "--rounds", str(rounds), "--requests", str(requests))
    if costs is None:
        return []
    for name, cost in costs.items():
        say(f"  {name:<40} {cost:>8.2f}")
    return [Row(f"layer: {name}", "µs", cost, None, None, None) for name, cost in costs.items()]


def durable(bench: Bench) -> list[Row]:
    """Dead letters on disk a second, 64 failing at a time, in a process of its own (`durable.py`)."""
    rounds, seconds = bench.profile.durable
    cores = {bench.proxy_core, *os.sched_getaffinity(0)}
    argv = ["benchmarks.durable", "--rounds", str(rounds), "--seconds", str(seconds)]
    found = _by_itself(bench, "durable", cores, *argv)
    if found is None:
        return []
    if found["volatile"] is not None:
        bench.complaints.append(f"durable: {found['volatile']} syncs nothing; set TMPDIR to a folder on a real disk")
    rates = found["taken"]
    for name, values in rates.items():
        say(f"  {name:<40} {statistics.median(values):>8,.0f}/s")
    must = Must("sidecar", "at least", LEAST_DEAD_LETTERS)
    taken = {"sidecar": rates[KEPT], "direct": rates[FILES]}
    return [
        Row(
            "dead letters kept, 64 at a time",
            "/s (direct: a file each)",
            statistics.median(taken["sidecar"]),
            None,
            statistics.median(taken["direct"]),
            must,
            taken,
        )
    ]


def outages(bench: Bench) -> list[Row]:
    """What an app sees of upstreams that die, fail and come back, with default breakers, in `outages.py`."""
    healthy, down, flaky = map(str, bench.profile.outages)
    cores = {bench.proxy_core, *os.sched_getaffinity(0)}
    argv = ["benchmarks.outages", "--healthy", healthy, "--down", down, "--flaky", flaky]
    found = _by_itself(bench, "outages", cores, *argv)
    if found is None:
        return []
    for name, value in found.items():
        say(f"  {name:<46} {value:>8.3g}")
    return [
        Row(name, "s" if name in SECONDS else "", value, None, None, Must("sidecar", "at most", BOUNDS[name]))
        for name, value in found.items()
    ]


def _by_itself(bench: Bench, what: str, cores: set[int], module: str, *options: str) -> Any:
    """What a module of this package measures in a process of its own; None, with a complaint, if it cannot."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, "--json", *options],
            cwd=ROOT,
            env=clean_environment(),
            capture_output=True,
            timeout=ALONE_LIMIT_SECONDS,
            check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        said = done.stderr.decode(errors="replace").strip()
        if done.returncode == 0:
            return json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        said = repr(error)
    bench.complaints.append(f"{what}: {said[-300:]}")
    return None


# ---- who takes part ----------------------------------------------------------------------------------------------


def _traced_pair(bench: Bench, percent: int) -> tuple[Pair, tuple[Receiver, Receiver]]:
    casting, setup = bench.casting, f"{percent} % traced"
    receivers = (casting.receiver(), casting.receiver())
    sidecar = casting.sidecar(setup, export_environment(receivers[0].endpoint, percent / 100))
    envoy = casting.envoy("envoy-telemetry.yaml", setup, percent=percent, receiver_port=receivers[1].port)
    return Pair(sidecar, envoy), receivers


def exports_received(receiver: Receiver) -> int:
    """How many requests a receiver has had, without this one."""
    counts = re.search(r"\n *\d+ +\d+ +(\d+)", _text(Aim(receiver.port, "/received", LOOPBACK)))
    return int(counts[1]) - 1 if counts else 0


# ---- what Sidecar says about its spans ---------------------------------------------------------------------------


def spans_by_result(exposition: str) -> dict[str, int]:
    """`sidecar_telemetry_spans_total` by what became of them."""
    found = re.findall(r'^sidecar_telemetry_spans_total\{result="(\w+)"\} ([0-9.e+]+)', exposition, re.MULTILINE)
    return {result: int(float(count)) for result, count in found}


def _spans(peer: Peer) -> dict[str, int]:
    return spans_by_result(_text(Aim(peer.admin_port, "/metrics", LOOPBACK)))


def _spans_lost(peer: Peer) -> int:
    spans = _spans(peer)
    return spans.get("export_failed", 0) + spans.get("dropped_queue_full", 0)


def _more_lost(peer: Peer, before: int) -> bool:
    return _spans_lost(peer) > before


def _delivered(peer: Peer) -> float | None:
    """The share, in percent, of sampled spans that reached the receiver."""
    spans = _spans(peer)
    arrived = spans.get("exported", 0)
    sampled = arrived + spans.get("export_failed", 0) + spans.get("dropped_queue_full", 0)
    return 100 * arrived / sampled if sampled else None


def _wait_for_export(bench: Bench, peer: Peer) -> None:
    """Until spans arrive (again), so that there is something to interrupt."""
    exported = _spans(peer).get("exported", 0)

    def arrived() -> bool:
        for _ in range(100):
            _text(reverse_json(peer))
        return _spans(peer).get("exported", 0) > exported

    if not _wait_for(arrived):
        bench.complaints.append(f"{peer.label}: nothing was exported within {RECOVERY_LIMIT_SECONDS:.0f} s")


def _text(aim: Aim) -> str:
    """What is answered; nothing when nobody answers, which the figures then show."""
    try:
        return fetch(aim)[1].decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""


def _wait_for(seen: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + RECOVERY_LIMIT_SECONDS
    while time.monotonic() < deadline:
        if seen():
            return True
        time.sleep(0.1)
    return False
