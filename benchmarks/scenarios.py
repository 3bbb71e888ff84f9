"""What is measured: one function per scenario, each turning a `Bench` into rows, and the order in which they run.

Here: the data plane, both proxies as plain as they come. What policies and telemetry cost is in `pipeline.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.bench import QUICK, Bench, forward_json, json_rate, reverse_json
from benchmarks.https import https
from benchmarks.load import IdleConnections, Sample, transfer_megabytes_per_second, wrk
from benchmarks.paced import even_rate, p99_milliseconds
from benchmarks.peers import JSON_BODY, MEGABYTE, MEGABYTE_PATH, STREAM_BYTES, STREAM_PATH, Aim, Peer, megabyte
from benchmarks.pipeline import collector, durable, layers, outages, resilience, telemetry
from benchmarks.report import Must, Row, cpu_row, median_row

RETRIES = "retries"
BULK_CONNECTIONS = 8
TUNNEL_BYTES = 1 << 30  # the first half of the stream's file
SETTLE_SECONDS = 0.7
QUIET_SHARE = 0.5  # the latency scenario runs at this part of Sidecar's own peak


def memory(bench: Bench) -> list[Row]:
    """Resident memory before any load: after one request, then with a thousand idle connections."""
    idle: dict[str, list[Sample]] = {}
    crowded: dict[str, list[Sample]] = {}
    bench.compare_bodies("one request", bench.cast.everyone, reverse_json, JSON_BODY.encode())
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
        median_row("resident memory, idle", "MB", Must("sidecar", "at most", 60), idle, RETRIES),
        median_row("resident memory, 1,000 idle connections", "MB", Must("sidecar", "at most", 100), crowded, RETRIES),
    ]


def throughput(bench: Bench) -> list[Row]:
    """Small JSON answers, as many as possible, asked both ways."""
    rows = []
    for mode, aim in (("reverse", reverse_json), ("forward", forward_json)):
        what = f"150-byte JSON, {mode}"
        bench.compare_bodies(what, (bench.cast.direct,), aim, JSON_BODY.encode())
        taken = bench.small_answers(what, bench.cast.proxies, aim)
        taken["direct"] = [bench.take(what, bench.cast.direct, json_rate(aim, bench.profile.throughput[1]))]
        row = median_row(what, "requests/s", Must("ratio", "at least", 1.3), taken, RETRIES)
        if mode == "reverse":
            bench.peak = row.sidecar
        rows += [row, cpu_row(what, taken, RETRIES)]
    return rows


def latency(bench: Bench) -> list[Row]:
    """What a proxy adds to the direct 99th percentile, at half of Sidecar's peak, the same rate for all."""
    # Two short rounds cannot judge a percentile: Envoy against Envoy came out at up to 2.1 in a quick run.
    must = None if bench.profile is QUICK else Must("ratio", "at most", 1.5)
    peak = bench.peak_rate()
    if peak < 100:
        bench.complaints.append("latency: Sidecar has no usable peak rate, so there is no rate to measure at")
        return [Row("added p99", "ms", None, None, None, must)]
    rate = even_rate(peak * QUIET_SHARE)
    rounds, seconds = bench.profile.latency
    log = bench.folder / "h2load.log"

    def p99(peer: Peer) -> Sample:
        return p99_milliseconds(reverse_json(peer), rate=rate, seconds=seconds, log=log)

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
            RETRIES,
        )
    ]


def bulk(bench: Bench) -> list[Row]:
    """1 MiB answers on a few connections."""
    rounds, seconds = bench.profile.bulk
    bench.compare_bodies("1 MiB", bench.cast.everyone, lambda peer: peer.reverse(MEGABYTE_PATH), megabyte())

    def speed(peer: Peer) -> Sample:
        aim = peer.reverse(MEGABYTE_PATH)
        result = wrk(aim, connections=BULK_CONNECTIONS, seconds=seconds, body_bytes=MEGABYTE)
        return result.megabytes_per_second

    bench.rounds("warm-up", bench.cast.proxies, 1, speed)
    taken = bench.rounds("1 MiB responses", bench.cast.proxies, rounds, speed)
    taken["direct"] = [bench.take("1 MiB responses", bench.cast.direct, speed)]
    return [median_row("1 MiB responses", "MB/s", Must("ratio", "at least", 0.8), taken, RETRIES)]


def stream(bench: Bench) -> list[Row]:
    """One 2 GiB answer to a reader that throws it away."""

    def speed(peer: Peer) -> Sample:
        return transfer_megabytes_per_second(peer.reverse(STREAM_PATH), STREAM_BYTES)

    # The first pass fills the page cache; it is asked directly, so that no proxy pays for it.
    bench.take("warm-up", bench.cast.direct, speed)
    taken = bench.rounds("2 GiB stream", bench.cast.proxies, bench.profile.stream_rounds, speed)
    taken["direct"] = [bench.take("2 GiB stream", bench.cast.direct, speed)]
    return [median_row("2 GiB stream", "MB/s", Must("ratio", "at least", 0.8), taken, RETRIES)]


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
    return [median_row("CONNECT tunnel, 1 GiB", "MB/s", Must("ratio", "at least", 0.3), taken, RETRIES)]


# In the order they run: memory first, while the processes are fresh.
SCENARIOS: dict[str, Callable[[Bench], list[Row]]] = {
    "memory": memory,
    "throughput": throughput,
    "latency": latency,
    "resilience": resilience,
    "telemetry": telemetry,
    "collector": collector,
    "layers": layers,
    "durable": durable,
    "outages": outages,
    "bulk": bulk,
    "stream": stream,
    "tunnel": tunnel,
    "https": https,
}


def closing_rows(bench: Bench) -> list[Row]:
    """What only the whole run can tell: memory after all of it, and requests that failed in any of it."""
    after = {peer.name: [_resident(peer)] for peer in bench.cast.proxies}
    failed = {name: [Sample(float(bench.failed.get(name, 0)), 0)] for name in ("sidecar", "envoy", "direct")}
    asked = bench.requests.get("sidecar", 0)
    return [
        median_row("resident memory, after the load", "MB", None, after, RETRIES),
        median_row(f"failed, of Sidecar's {asked:,}", "requests", Must("sidecar", "at most", 0), failed),
    ]


def _resident(peer: Peer) -> Sample:
    return Sample(peer.running.resident_bytes() / 1e6, 0)


def _origin(peer: Peer) -> Aim:
    """The request as the upstream itself reads it, which is what travels inside a tunnel."""
    return Aim(peer.port, STREAM_PATH, peer.authority)


def _difference(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base
