"""What is measured: one function per scenario, each turning a `Bench` into rows.

The two proxies take turns on the same core, in an order that reverses every round, after a warm-up of each; a
figure is the median of its rounds. Every sample passes through `Bench.take`, which keeps the count of failed
requests and of time lost to other work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.load import (
    IdleConnections,
    Sample,
    compare_body,
    p99_milliseconds,
    transfer_megabytes_per_second,
    wrk,
)
from benchmarks.peers import (
    JSON_BODY,
    MEGABYTE,
    MEGABYTE_PATH,
    STREAM_BYTES,
    STREAM_PATH,
    Aim,
    Cast,
    Peer,
    megabyte,
)
from benchmarks.processes import stolen_seconds
from benchmarks.report import Must, Row, median_row

Measure = Callable[[Peer], Sample]

SMALL_CONNECTIONS = 32
BULK_CONNECTIONS = 8
TUNNEL_BYTES = 1 << 30  # the first half of the stream's file
SETTLE_SECONDS = 0.7
SHORTEST_ROUND_SECONDS = 0.5  # below this the share of lost time says nothing
QUIET_SHARE = 0.5  # the latency scenario runs at this part of Sidecar's own peak


@dataclass(frozen=True)
class Profile:
    """How long each scenario takes: rounds, and whole seconds per round."""

    name: str
    warm_up: int
    throughput: tuple[int, int]
    latency: tuple[int, int]
    bulk: tuple[int, int]
    stream_rounds: int


FULL = Profile("full", warm_up=2, throughput=(5, 3), latency=(7, 2), bulk=(5, 2), stream_rounds=5)
QUICK = Profile("quick", warm_up=1, throughput=(3, 1), latency=(2, 1), bulk=(2, 1), stream_rounds=2)


@dataclass
class Bench:
    """The state of one run: who takes part, for how long, and what has been seen so far."""

    cast: Cast
    profile: Profile
    folder: Path
    proxy_core: int
    peak: float | None = None
    requests: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)

    def take(self, what: str, peer: Peer, measure: Measure) -> Sample:
        """One measurement of one peer, with failures and the time lost to other work written down."""
        lost_before, began = self._seconds_lost(peer), time.perf_counter()
        sample = measure(peer)
        elapsed = time.perf_counter() - began
        lost = 0.0
        if peer is not self.cast.direct and elapsed > SHORTEST_ROUND_SECONDS:
            lost = (self._seconds_lost(peer) - lost_before) / elapsed
            self.noise.append(lost)
        self.requests[peer.name] = self.requests.get(peer.name, 0) + sample.requests
        self.failed[peer.name] = self.failed.get(peer.name, 0) + sample.failed
        self.complaints.extend(f"{what}, {peer.name}: {complaint}" for complaint in sample.complaints)
        say(f"  {what:<30} {peer.name:<8} {sample.value:>12,.2f}" + (f"   noise {lost:.1%}" if lost else ""))
        return sample

    def rounds(self, what: str, peers: Sequence[Peer], count: int, measure: Measure) -> dict[str, list[Sample]]:
        """Peers in turn, `count` times, the order reversed every other round so that drift favours nobody."""
        taken: dict[str, list[Sample]] = {peer.name: [] for peer in peers}
        for number in range(count):
            for peer in peers if number % 2 == 0 else tuple(reversed(peers)):
                taken[peer.name].append(self.take(what, peer, measure))
        return taken

    def _seconds_lost(self, peer: Peer) -> float:
        return peer.running.seconds_waiting_for_a_core() + stolen_seconds(self.proxy_core)


def memory(bench: Bench) -> list[Row]:
    """Resident memory before any load: after one request, then with a thousand idle connections."""
    idle: dict[str, list[Sample]] = {}
    crowded: dict[str, list[Sample]] = {}
    _verify(bench, "one request", _reverse_json, JSON_BODY.encode())
    for peer in bench.cast.proxies:
        time.sleep(SETTLE_SECONDS)
        idle[peer.name] = [bench.take("resident, idle", peer, _resident)]
        connections = IdleConnections(1000, "/json", len(JSON_BODY))
        try:
            bench.take("opening connections", peer, connections.open)
            time.sleep(SETTLE_SECONDS)
            crowded[peer.name] = [bench.take("resident, 1,000 idle", peer, _resident)]
            gone = connections.closed_by_peer()
        finally:
            connections.close()
        if gone:
            bench.failed[peer.name] += gone
            bench.complaints.append(f"{peer.name} closed {gone} of the idle connections by itself")
    return [
        median_row("resident memory, idle", "MB", Must("sidecar", "at most", 60), idle),
        median_row("resident memory, 1,000 idle connections", "MB", Must("sidecar", "at most", 100), crowded),
    ]


def throughput(bench: Bench) -> list[Row]:
    """Small JSON answers, as many as possible, asked both ways."""
    rows = []
    rounds, seconds = bench.profile.throughput
    must = Must("ratio", "at least", 1.3)
    for mode, aim in (("reverse", _reverse_json), ("forward", _forward_json)):
        what = f"150-byte JSON, {mode}"
        _verify(bench, what, aim, JSON_BODY.encode())
        bench.rounds("warm-up", bench.cast.proxies, 1, _json_rate(aim, bench.profile.warm_up))
        taken = bench.rounds(what, bench.cast.proxies, rounds, _json_rate(aim, seconds))
        taken["direct"] = [bench.take(what, bench.cast.direct, _json_rate(aim, seconds))]
        row = median_row(what, "requests/s", must, taken)
        if mode == "reverse":
            bench.peak = row.sidecar
        rows.append(row)
    return rows


def latency(bench: Bench) -> list[Row]:
    """What a proxy adds to the direct 99th percentile, at half of Sidecar's peak, the same rate for all."""
    # Two short rounds cannot judge a percentile: Envoy against Envoy came out at up to 2.1 in a quick run.
    must = None if bench.profile is QUICK else Must("ratio", "at most", 1.5)
    peak = bench.peak or _short_peak(bench)
    if peak < 100:
        bench.complaints.append("latency: Sidecar has no usable peak rate, so there is no rate to measure at")
        return [Row("added p99", "ms", None, None, None, must)]
    rate = round(peak * QUIET_SHARE, -2)
    rounds, seconds = bench.profile.latency
    log = bench.folder / "h2load.log"

    def p99(peer: Peer) -> Sample:
        return p99_milliseconds(_reverse_json(peer), rate=rate, seconds=seconds, log=log)

    taken = bench.rounds(f"p99 at {rate:,.0f}/s", bench.cast.everyone, rounds, p99)
    whole = median_row("p99", "ms", None, taken)
    return [
        Row(
            f"added p99 at {rate:,.0f} requests/s",
            "ms (direct: its own p99)",
            _difference(whole.sidecar, whole.direct),
            _difference(whole.envoy, whole.direct),
            whole.direct,
            must,
            whole.samples,
        )
    ]


def bulk(bench: Bench) -> list[Row]:
    """1 MiB answers on a few connections."""
    rounds, seconds = bench.profile.bulk
    _verify(bench, "1 MiB", lambda peer: peer.reverse(MEGABYTE_PATH), megabyte())

    def speed(peer: Peer) -> Sample:
        aim = peer.reverse(MEGABYTE_PATH)
        result = wrk(aim, connections=BULK_CONNECTIONS, seconds=seconds, body_bytes=MEGABYTE)
        return result.megabytes_per_second

    bench.rounds("warm-up", bench.cast.proxies, 1, speed)
    taken = bench.rounds("1 MiB responses", bench.cast.proxies, rounds, speed)
    taken["direct"] = [bench.take("1 MiB responses", bench.cast.direct, speed)]
    return [median_row("1 MiB responses", "MB/s", Must("ratio", "at least", 0.8), taken)]


def stream(bench: Bench) -> list[Row]:
    """One 2 GiB answer to a reader that throws it away."""

    def speed(peer: Peer) -> Sample:
        return transfer_megabytes_per_second(peer.reverse(STREAM_PATH), STREAM_BYTES)

    # The first pass fills the page cache; it is asked directly, so that no proxy pays for it.
    bench.take("warm-up", bench.cast.direct, speed)
    taken = bench.rounds("2 GiB stream", bench.cast.proxies, bench.profile.stream_rounds, speed)
    taken["direct"] = [bench.take("2 GiB stream", bench.cast.direct, speed)]
    return [median_row("2 GiB stream", "MB/s", Must("ratio", "at least", 0.8), taken)]


def tunnel(bench: Bench) -> list[Row]:
    """1 GiB inside a CONNECT tunnel."""
    some = f"Range: bytes=0-{TUNNEL_BYTES - 1}\r\n"

    def plain(peer: Peer) -> Sample:
        return transfer_megabytes_per_second(_origin(peer), TUNNEL_BYTES, extra_head=some)

    def speed(peer: Peer) -> Sample:
        return transfer_megabytes_per_second(_origin(peer), TUNNEL_BYTES, extra_head=some, tunnel_to=peer.authority)

    bench.take("warm-up", bench.cast.direct, plain)  # the page cache again, for a run of this scenario alone
    taken = bench.rounds("CONNECT tunnel", bench.cast.proxies, bench.profile.stream_rounds, speed)
    taken["direct"] = [bench.take("CONNECT tunnel", bench.cast.direct, plain)]
    return [median_row("CONNECT tunnel, 1 GiB", "MB/s", Must("ratio", "at least", 0.3), taken)]


# In the order they run: memory first, while the processes are fresh.
SCENARIOS: dict[str, Callable[[Bench], list[Row]]] = {
    "memory": memory,
    "throughput": throughput,
    "latency": latency,
    "bulk": bulk,
    "stream": stream,
    "tunnel": tunnel,
}


def closing_rows(bench: Bench) -> list[Row]:
    """What only the whole run can tell: memory after all of it, and requests that failed in any of it."""
    after = {peer.name: [_resident(peer)] for peer in bench.cast.proxies}
    failed = {name: [Sample(float(bench.failed.get(name, 0)), 0)] for name in ("sidecar", "envoy", "direct")}
    asked = bench.requests.get("sidecar", 0)
    return [
        median_row("resident memory, after the load", "MB", None, after),
        median_row(f"failed, of Sidecar's {asked:,}", "requests", Must("sidecar", "at most", 0), failed),
    ]


def say(line: str) -> None:
    """Progress, apart from the table on standard output."""
    print(line, file=sys.stderr, flush=True)


def _verify(bench: Bench, what: str, aim: Callable[[Peer], Aim], expected: bytes) -> None:
    for peer in bench.cast.everyone:
        bench.take(f"{what}, bytes", peer, lambda each: compare_body(aim(each), expected))


def _json_rate(aim: Callable[[Peer], Aim], seconds: int) -> Measure:
    def measure(peer: Peer) -> Sample:
        result = wrk(aim(peer), connections=SMALL_CONNECTIONS, seconds=seconds, body_bytes=len(JSON_BODY))
        return result.requests_per_second

    return measure


def _short_peak(bench: Bench) -> float:
    """Sidecar's peak when the throughput scenario was left out: a warm-up, then one measured round."""
    bench.take("warm-up", bench.cast.sidecar, _json_rate(_reverse_json, 1))
    return bench.take("peak", bench.cast.sidecar, _json_rate(_reverse_json, 2)).value


def _resident(peer: Peer) -> Sample:
    return Sample(peer.running.resident_bytes() / 1e6, 0)


def _reverse_json(peer: Peer) -> Aim:
    return peer.reverse("/json")


def _forward_json(peer: Peer) -> Aim:
    return peer.forward("/json")


def _origin(peer: Peer) -> Aim:
    """The request as the upstream itself reads it, which is what travels inside a tunnel."""
    return Aim(peer.port, STREAM_PATH, peer.authority)


def _difference(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base
