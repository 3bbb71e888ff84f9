"""What is true of the proxy now, in the shapes telemetry asks for at each scrape.

Law: reads living objects, counts nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from sidecar import clock
from sidecar.proxy import Proxy
from sidecar.upstream.endpoints import UpstreamState
from telemetry.live import LiveBreaker, LiveDeadLetters, LiveUpstream


class LiveFacts:
    """Implements `telemetry.live.Live`. `not_ready` says None, or why not."""

    def __init__(self, proxy: Proxy, not_ready: Callable[[], str | None]) -> None:
        self._proxy = proxy
        self._not_ready = not_ready

    def upstreams(self) -> Iterator[LiveUpstream]:
        now = clock.monotonic()
        for state in self._proxy.directory.states():
            active, idle = state.connections
            opened, failed = state.connects
            yield LiveUpstream(
                label=state.label,
                in_flight=state.requests,
                active=active,
                idle=idle,
                connects={"success": opened, "failure": failed},
                tls_unverified=state.settings.insecure_skip_verify,
                budget_left=state.budget.remaining(now),
                gate_waiting=state.turns.gate.waiting,
                gate_pauses=state.turns.gate.pauses,
                breakers=tuple(self._breakers(state, now)),
            )

    def _breakers(self, state: UpstreamState, now: float) -> Iterator[LiveBreaker]:
        for label, breaker in state.breakers():
            seen = breaker.snapshot(now)
            changed = None if seen.changed_at is None else self._proxy.wall(seen.changed_at)
            yield LiveBreaker(label, seen.state, seen.failure_ratio, changed)

    def ready(self) -> bool:
        return self._not_ready() is None and not self._proxy.kept.gone

    def keeps(self) -> bool | None:
        kept = self._proxy.kept
        if kept.durable is None and kept.problem is None:
            return None
        return kept.problem is None

    def downstream_connections(self) -> int:
        return len(self._proxy.downstreams)

    def memory(self) -> tuple[Mapping[str, int], int, int]:
        held = self._proxy.held
        by_kind = {"bodies": held.bodies, "answers": held.answers, "unwritten": held.unwritten}
        return by_kind, held.most, held.given_up

    def label_overflows(self) -> int:
        return self._proxy.directory.label_overflows

    def dead_letters(self) -> LiveDeadLetters | None:
        """As the store last counted them, a few seconds ago."""
        durable = self._proxy.kept.durable
        if durable is None:
            return None
        stats = durable.listing.stats
        waiting: dict[str, tuple[int, float | None]] = {
            state.label: (0, None) for state in self._proxy.directory.states()
        }
        waiting |= {label: (count, stats.oldest.get(label)) for label, count in stats.waiting.items()}
        return LiveDeadLetters(
            waiting=waiting,
            size=stats.bytes,
            capacity=durable.letters.settings.max_bytes,
            disk_free=stats.disk_free or 0,
        )

    def incomplete(self) -> bool:
        return self._proxy.kept.incomplete is not None

    def outbox_jobs(self) -> Mapping[str, int] | None:
        durable = self._proxy.kept.durable
        return None if durable is None or durable.jobs is None else durable.job_counts
