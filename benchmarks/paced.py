"""Requests at a fixed rate, with `h2load`, whose log tells the start and the duration of every one of them.

A figure is the 99th percentile. Connections join and leave one by one, so both ends of a run are cut off.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.load import Sample, failure, run_tool
from benchmarks.peers import Aim
from benchmarks.processes import LOOPBACK

CONNECTIONS = 32
EDGE_SECONDS = 0.5  # cut from both ends
JOINING_MILLISECONDS = range(3, 14)
RATE_STEPS = 5  # how many hundreds a second a rate may be moved for an even load

Timing = tuple[int, int]
"""When a request began, in microseconds since 1970, and how many it took."""


@dataclass(frozen=True)
class Paced:
    """One run: the requests of its middle part, all that were sent, and what went wrong."""

    kept: Sequence[Timing]
    requests: int
    failed: int
    complaints: tuple[str, ...]


def paced(aim: Aim, *, rate: float, seconds: float, log: Path) -> Paced:
    """`rate` requests every second, for so long."""
    per_connection = rate / CONNECTIONS
    requests = round(rate * (seconds + 2 * EDGE_SECONDS))
    log.unlink(missing_ok=True)
    argv = ["h2load", "--h1", "-t1", f"-c{CONNECTIONS}", f"-n{requests}", f"--log-file={log}"]
    argv += [f"--rps={per_connection:.3f}", "-r1", f"--rate-period={joining_interval(per_connection)}ms"]
    argv += [f"http://{LOOPBACK}:{aim.port}{aim.target}"]
    output = run_tool(argv, seconds)
    counts = re.search(r"requests: (\d+) total, .* (\d+) succeeded, ", output)
    if counts is None or not log.exists():
        return Paced((), 1, 1, (f"h2load gave no figures: {output.strip()[-300:]}",))
    total, succeeded = int(counts[1]), int(counts[2])
    complaints = [] if total == succeeded else [f"h2load: {total - succeeded} of {total} requests failed"]
    kept = middle(log.read_text())
    if not kept:
        return Paced(
            (), total, max(1, total - succeeded), (*complaints, "h2load: the run was too short to be measured")
        )
    achieved = len(kept) / ((kept[-1][0] - kept[0][0]) / 1e6 or 1.0)
    if achieved < 0.95 * rate:
        # Not a failed request, but the figure then describes a lighter load than the one asked for.
        complaints.append(f"h2load: only {achieved:,.0f} of {rate:,.0f} requests per second were reached")
    return Paced(kept, total, total - succeeded, tuple(complaints))


def middle(log: str) -> list[Timing]:
    """The requests of h2load's log in the order they began, without those at its two ends."""
    rows = sorted((int(start), int(took)) for start, _, took, *_ in (row.split("\t") for row in log.splitlines()))
    if not rows:
        return []
    first, last = rows[0][0] + EDGE_SECONDS * 1e6, rows[-1][0] - EDGE_SECONDS * 1e6
    return [row for row in rows if first <= row[0] <= last]


def p99_milliseconds(aim: Aim, *, rate: float, seconds: int, log: Path) -> Sample:
    """The 99th percentile of response times while `rate` requests are sent every second."""
    run = paced(aim, rate=rate, seconds=seconds, log=log)
    return Sample(p99(run.kept), run.requests, run.failed, run.complaints)


@dataclass(frozen=True)
class BeforeAndAfter:
    """The 99th percentiles on both sides of something that happened in the middle of one run."""

    before: Sample
    after: Sample


def p99_around(aim: Aim, happening: Callable[[], None], *, rate: float, seconds: float, log: Path) -> BeforeAndAfter:
    """`seconds` of load, then `happening`, then as many again, in one run on the same connections."""
    happened: list[float] = []

    def happen() -> None:
        happened.append(time.time() * 1e6)
        happening()

    timer = threading.Timer(EDGE_SECONDS + seconds, happen)
    timer.start()
    try:
        run = paced(aim, rate=rate, seconds=2 * seconds, log=log)
    finally:
        timer.cancel()
        timer.join()
    if not happened or not run.kept:
        broken = failure("; ".join(run.complaints) or "the load ended before the middle of its run", run.requests)
        return BeforeAndAfter(broken, broken)
    at = happened[0]
    before = [row for row in run.kept if row[0] + row[1] < at]
    after = [row for row in run.kept if row[0] + row[1] >= at]
    # One run, so what failed in it is counted once.
    return BeforeAndAfter(Sample(p99(before), 0), Sample(p99(after), run.requests, run.failed, run.complaints))


def p99(rows: Sequence[Timing]) -> float:
    """In milliseconds; 0 of nothing."""
    if not rows:
        return 0.0
    took = sorted(took for _, took in rows)
    return took[min(len(took) - 1, int(len(took) * 0.99))] / 1000


def even_rate(wanted: float) -> float:
    """The rate nearest to the one wanted, in hundreds a second, at which the beats of all connections can be spread."""
    nearest = max(1, round(wanted / 100))
    steps = sorted(range(max(1, nearest - RATE_STEPS), nearest + RATE_STEPS + 1), key=lambda step: abs(step - nearest))
    return 100.0 * max(steps, key=lambda step: min(0.5, _evenness(100 * step / CONNECTIONS)))


def joining_interval(per_connection_rate: float) -> int:
    """Milliseconds between the first requests of two connections, so that their beats do not coincide.

    Each connection sends on a fixed beat. Were they all to start together, every beat would be a burst of 32
    and the percentile would describe the burst.
    """
    return max(JOINING_MILLISECONDS, key=lambda interval: _tightest_gap(interval, 1000 / per_connection_rate))


def _evenness(per_connection_rate: float) -> float:
    """1 when the requests of all connections are equally far apart, 0 when some coincide."""
    beat = 1000 / per_connection_rate
    return _tightest_gap(joining_interval(per_connection_rate), beat) / (beat / CONNECTIONS)


def _tightest_gap(interval: int, beat: float) -> float:
    phases = sorted((number * interval) % beat for number in range(CONNECTIONS))
    return min(after - before for before, after in pairwise([*phases, phases[0] + beat]))
