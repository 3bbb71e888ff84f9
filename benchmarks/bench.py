"""The state of one run: who takes part, for how long, what has been seen.

The two proxies take turns on the same core, in an order that reverses every round, after a warm-up of each; a
figure is the median of its rounds. Every sample passes through `Bench.take`, which keeps the count of failed
requests, of time lost to other work, and of what a request cost the proxy's core.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.load import Sample, compare_body, wrk
from benchmarks.peers import JSON_BODY, Aim, Cast, Casting, Peer
from benchmarks.processes import stolen_seconds

Measure = Callable[[Peer], Sample]

SMALL_CONNECTIONS = 32
SHORTEST_ROUND_SECONDS = 0.5  # below this the share of lost time says nothing
FEWEST_REQUESTS = 1000  # below this the time on a core, counted in hundredths of a second, says nothing


@dataclass(frozen=True)
class Profile:
    """How long each scenario takes: rounds, and whole seconds per round."""

    name: str
    warm_up: int
    throughput: tuple[int, int]
    latency: tuple[int, int]
    bulk: tuple[int, int]
    stream_rounds: int
    collector: tuple[int, int]
    layers: tuple[int, int]
    """Rounds, and requests per round."""
    durable: tuple[int, int]
    outages: tuple[int, int, int]
    """Seconds healthy, seconds down, seconds of random failures beside them."""


FULL = Profile(
    "full",
    warm_up=2,
    throughput=(5, 3),
    latency=(7, 2),
    bulk=(5, 2),
    stream_rounds=5,
    collector=(2, 3),
    layers=(15, 10_000),
    durable=(5, 3),
    outages=(20, 8, 60),
)
QUICK = Profile(
    "quick",
    warm_up=1,
    throughput=(3, 1),
    latency=(2, 1),
    bulk=(2, 1),
    stream_rounds=2,
    collector=(1, 2),
    layers=(5, 3_000),
    durable=(2, 1),
    outages=(5, 4, 10),
)


@dataclass
class Bench:
    """See the module's law."""

    cast: Cast
    casting: Casting
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
        proxy = peer is not self.cast.direct
        lost_before, cpu_before, began = self._seconds_lost(peer), peer.running.cpu_seconds(), time.perf_counter()
        sample = measure(peer)
        elapsed = time.perf_counter() - began
        lost = 0.0
        if proxy and elapsed > SHORTEST_ROUND_SECONDS:
            lost = (self._seconds_lost(peer) - lost_before) / elapsed
            self.noise.append(lost)
            peer.running.wait_until_quiet()
            if sample.requests >= FEWEST_REQUESTS:
                cpu = (peer.running.cpu_seconds() - cpu_before) / sample.requests * 1e6
                sample = replace(sample, cpu_microseconds=cpu)
        self.count(what, peer, sample)
        self.tell(what, peer, sample, lost)
        return sample

    def count(self, what: str, peer: Peer, sample: Sample) -> None:
        self.requests[peer.name] = self.requests.get(peer.name, 0) + sample.requests
        self.failed[peer.name] = self.failed.get(peer.name, 0) + sample.failed
        self.complaints.extend(f"{what}, {peer.label}: {complaint}" for complaint in sample.complaints)

    def tell(self, what: str, peer: Peer, sample: Sample, lost: float = 0.0) -> None:
        """One line of progress."""
        line = f"  {what:<34} {peer.name:<8} {sample.value:>12,.2f}"
        if sample.cpu_microseconds is not None:
            line += f"   CPU {sample.cpu_microseconds:.1f} µs/request"
        say(line + (f"   noise {lost:.1%}" if lost else ""))

    def rounds(self, what: str, peers: Sequence[Peer], count: int, measure: Measure) -> dict[str, list[Sample]]:
        """Peers in turn, `count` times, the order reversed every other round so that drift favours nobody."""
        taken: dict[str, list[Sample]] = {peer.name: [] for peer in peers}
        for number in range(count):
            for peer in peers if number % 2 == 0 else tuple(reversed(peers)):
                taken[peer.name].append(self.take(what, peer, measure))
        return taken

    def compare_bodies(self, what: str, peers: Sequence[Peer], aim: Callable[[Peer], Aim], expected: bytes) -> None:
        """One answer of each, byte by byte, outside the timed rounds."""
        for peer in peers:
            self.take(f"{what}, bytes", peer, lambda each: compare_body(aim(each), expected))

    def small_answers(self, what: str, proxies: Sequence[Peer], aim: Callable[[Peer], Aim]) -> dict[str, list[Sample]]:
        """The 150-byte JSON, as often as possible: compared, warmed up, then measured in turns."""
        rounds, seconds = self.profile.throughput
        self.compare_bodies(what, proxies, aim, JSON_BODY.encode())
        self.rounds("warm-up", proxies, 1, json_rate(aim, self.profile.warm_up))
        return self.rounds(what, proxies, rounds, json_rate(aim, seconds))

    def peak_rate(self) -> float:
        """What Sidecar as it comes can do; measured quickly when the throughput scenario was left out."""
        if self.peak is None:
            self.take("warm-up", self.cast.sidecar, json_rate(reverse_json, 1))
            self.peak = self.take("peak", self.cast.sidecar, json_rate(reverse_json, 2)).value
        return self.peak

    def _seconds_lost(self, peer: Peer) -> float:
        return peer.running.seconds_waiting_for_a_core() + stolen_seconds(self.proxy_core)


def say(line: str) -> None:
    """Progress, apart from the table on standard output."""
    print(line, file=sys.stderr, flush=True)


def json_rate(aim: Callable[[Peer], Aim], seconds: int) -> Measure:
    def measure(peer: Peer) -> Sample:
        result = wrk(aim(peer), connections=SMALL_CONNECTIONS, seconds=seconds, body_bytes=len(JSON_BODY))
        return result.requests_per_second

    return measure


def reverse_json(peer: Peer) -> Aim:
    return peer.reverse("/json")


def forward_json(peer: Peer) -> Aim:
    return peer.forward("/json")
