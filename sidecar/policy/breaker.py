"""The circuit breaker of one endpoint: CLOSED lets calls pass, OPEN refuses them, HALF_OPEN lets a few probes pass.

Law: pure, told the time. Whoever wants to call asks `admit(now)` for a permit and hands it back exactly once, with
`record` (it worked, or it failed) or `abandon` (neither). Every change of state begins a new generation, and what
comes back with a permit of an earlier one is ignored.
A request has one voice per endpoint and generation, its last word: a second failure of the same request adds nothing,
and a success after a failure takes the failure back. One slow call with four timeouts is one failure, and an endpoint
whose failures are all healed by a retry is healthy.

    CLOSED     → OPEN        the share of failures in the window, or failures in a row, see `_tripping`
    OPEN       → HALF_OPEN   by time alone; nobody has to call. Any method that is told the time notices it.
                             Opened by a failure to connect: as soon as somebody could connect, see `connected`
    HALF_OPEN  → CLOSED      `success_threshold` probes succeeded
    HALF_OPEN  → OPEN        one probe failed; the open time doubles, up to `open_for_max`

A probe holds a lease. It ends with its attempt, and after `lease` seconds even if the attempt never reports, so that
a lost probe cannot keep the breaker half open for good.
While forced open nothing passes; when the time is up it goes on with probes, as after any open time. While forced
closed everything passes and is counted, but nothing opens it. With `monitor_only`, or not `enabled`, it is CLOSED and
stays so unless an operator opens it.

The healthy path is two attribute reads: `admit` returns one permit object shared by the whole generation, and
`record` recognises it by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from config.breaker import Breaker as Settings
from config.errors import ErrorCode
from sidecar.policy.window import Window

CLOSED = "closed"
OPEN = "open"
HALF_OPEN = "half_open"

PROBE_LEASE = 60.0
_PROBE_UNDER_WAY = 1.0
"""When every probe is taken nobody knows when the next may go: ask again in a second."""

OnChange = Callable[[str, str, float, str], None]
"""Called as `on_change(from_state, to_state, at, why)`. `at` is when the change was due, `why` is for a person."""
OnWouldOpen = Callable[[float, str], None]


class Permit:
    """Leave to make one call. While CLOSED one object serves the whole generation, so that two calls with the same
    permit are two calls to the same endpoint in the same generation."""

    __slots__ = ("generation", "lease_ends", "probe")

    def __init__(self, generation: int, *, probe: bool, lease_ends: float = inf) -> None:
        self.generation = generation
        self.probe = probe
        self.lease_ends = lease_ends


class Forced(NamedTuple):
    """What an operator ordered. `until` is infinite when it holds until `reset`."""

    state: str
    until: float
    reason: str


class Snapshot(NamedTuple):
    """What there is to show of a breaker. Times are those of the monotonic clock."""

    state: str
    failure_count: int
    success_count: int
    consecutive_failures: int
    failure_ratio: float
    last_failure_at: float | None
    opened_at: float | None
    next_probe_at: float | None
    changed_at: float | None
    unreachable: bool
    """Opened because nobody could connect: it is half open as soon as somebody can."""
    generation: int
    probes: int
    would_open: int
    forced: Forced | None


def failure_codes(registry: Mapping[str, ErrorCode]) -> frozenset[str]:
    """The codes that speak against an endpoint: TRANSIENT network and 5xx ones. Not the sidecar's own (they are
    fatal), not conflicts, and not those that ask for patience (429)."""
    return frozenset(
        entry.code
        for entry in registry.values()
        if entry.category == "TRANSIENT" and entry.retry == "retryable" and entry.status >= 500
    )


def counts(code: str | None, status: int, failures: frozenset[str]) -> bool | None:
    """What an ended attempt says about the endpoint: True success, False failure, None neither. `failures` are the
    `failure_codes`; `status` is 0 when there was no answer."""
    if code is None:
        return True
    if 400 <= status < 500:
        return None
    return False if code in failures else None


class Breaker:
    """See the module's law."""

    __slots__ = (
        "_changed_at",
        "_checked",
        "_generation",
        "_last_failure_at",
        "_lease",
        "_on_change",
        "_on_would_open",
        "_open_time",
        "_opened_at",
        "_pass",
        "_probe_at",
        "_probe_successes",
        "_probes",
        "_quiet_until",
        "_run",
        "_settings",
        "_state",
        "_unreachable",
        "_window",
        "forced",
        "would_open",
    )

    def __init__(
        self,
        settings: Settings,
        on_change: OnChange | None = None,
        on_would_open: OnWouldOpen | None = None,
        *,
        lease: float = PROBE_LEASE,
    ) -> None:
        self._settings = settings
        self._on_change = on_change
        self._on_would_open = on_would_open
        self._lease = lease
        self._window = Window(settings.window)
        self._state = CLOSED
        self._generation = 0
        self._pass: Permit | None = Permit(0, probe=False)
        """While CLOSED: the permit everyone gets."""
        self._run = 0
        """Requests in a row that failed while CLOSED."""
        self._open_time = 0.0
        self._opened_at: float | None = None
        self._probe_at = inf
        """While OPEN: when it becomes HALF_OPEN."""
        self._unreachable = False
        """While OPEN: the failure that opened it was one to connect."""
        self._checked = False
        """While HALF_OPEN: because somebody could connect."""
        self._probes: list[Permit] = []
        """While HALF_OPEN: the leases that were given out."""
        self._probe_successes = 0
        self._changed_at: float | None = None
        self._last_failure_at: float | None = None
        self._quiet_until = -inf
        self.would_open = 0
        """How often `monitor_only` kept it from opening."""
        self.forced: Forced | None = None

    # ---- asked by every call ---------------------------------------------------------------------------------

    def admit(self, now: float) -> Permit | None:
        """A permit, or None: refused, see `retry_in`."""
        return self._pass or self._admit_probe(now)

    def record(
        self, permit: Permit, ok: bool, now: float, blamed: list[Permit] | None = None, *, connected: bool = True
    ) -> None:
        """The call ended and says something about the endpoint. `blamed`: the permits with which the same request has
        failed before; this one is added when it fails. `connected`: False when no connection could be made."""
        if permit is self._pass:
            if ok:
                self._run = 0
                self._window.successes.add(now)
                if blamed and permit in blamed:
                    self._window.failures.remove(now)
            else:
                self._last_failure_at = now
                if blamed is None:
                    self._failed_while_closed(now, connected=connected)
                elif permit not in blamed:
                    blamed.append(permit)
                    self._failed_while_closed(now, connected=connected)
        elif permit in self._held(now):
            self._probe_ended(permit, ok, now, connected=connected)

    def abandon(self, permit: Permit, now: float, waited: float | None = None) -> None:
        """The call ended and says nothing: cancelled, a 429, a 4xx. `waited` is given when the app went away before
        there was a head, in seconds: from `slow_after` on that is a failure after all."""
        slow_after = self._settings.slow_after
        if waited is not None and slow_after is not None and waited >= slow_after:
            self.record(permit, False, now)
        elif permit is not self._pass and permit in self._probes:
            self._probes.remove(permit)

    def retry_in(self, now: float) -> float:
        """Seconds until a refused call is worth another try; 0 when it would be let through now."""
        self._move(now)
        if self._pass is not None:
            return 0.0
        if self._state == OPEN:
            return (self._probe_at if self._probe_at != inf else now + self._settings.open_for_max) - now
        return 0.0 if len(self._held(now)) < self._settings.half_open_probes else _PROBE_UNDER_WAY

    # ---- while nobody could connect --------------------------------------------------------------------------

    def awaits_connection(self, now: float) -> bool:
        """Whether a bare connection, made now, could tell that the endpoint is back."""
        self._move(now)
        return self._state == OPEN and self._unreachable and self.forced is None and self._settings.connect_check

    def connected(self, now: float) -> None:
        """Somebody could connect to the endpoint: if that was the trouble, probes may go at once."""
        if self.awaits_connection(now):
            self._probe_at = now
            self._half_open(now, "it can be connected to again, probes may go")
            self._checked = True

    # ---- looked at -------------------------------------------------------------------------------------------

    def state(self, now: float) -> str:
        self._move(now)
        return self._state

    def failure_ratio(self, now: float) -> float:
        """The share of failures in the window; what HALF_OPEN sees is not in it."""
        return self._window.ratio(now)

    def snapshot(self, now: float) -> Snapshot:
        self._move(now)
        return Snapshot(
            state=self._state,
            failure_count=self._window.failures.total(now),
            success_count=self._window.successes.total(now),
            consecutive_failures=self._run,
            failure_ratio=self._window.ratio(now),
            last_failure_at=self._last_failure_at,
            opened_at=self._opened_at,
            next_probe_at=self._probe_at if self._state == OPEN and self._probe_at != inf else None,
            changed_at=self._changed_at,
            unreachable=self._state == OPEN and self._unreachable,
            generation=self._generation,
            probes=len(self._held(now)),
            would_open=self.would_open,
            forced=self.forced,
        )

    # ---- ordered by an operator ------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> None:
        """Other thresholds, from now on. The state stays, and so does what was counted, unless it is counted over
        another `window` now."""
        if settings.window != self._settings.window:
            self._window = Window(settings.window)
        self._settings = settings

    def force_open(self, now: float, reason: str, ttl: float = inf) -> None:
        self._move(now)
        self.forced = Forced(OPEN, now + ttl, reason)
        self._open_time = 0.0
        self._open(now, now + ttl, f"forced open: {reason}")

    def force_close(self, now: float, reason: str, ttl: float = inf) -> None:
        self._move(now)
        self.forced = Forced(CLOSED, now + ttl, reason)
        self._close(now, f"forced closed: {reason}")

    def reset(self, now: float, reason: str = "") -> None:
        """CLOSED, with everything forgotten, and nothing forced any more."""
        self._move(now)
        self.forced = None
        self._close(now, f"reset: {reason}" if reason else "reset")

    # ---- the machine -----------------------------------------------------------------------------------------

    def _move(self, now: float) -> None:
        """Do what time alone does."""
        if self.forced is not None and now >= self.forced.until:
            self.forced = None
        if self._state == OPEN and now >= self._probe_at:
            settings = self._settings
            if settings.monitor_only or not settings.enabled:
                # Only an operator can have opened it, and it must not refuse anything by itself.
                self._close(self._probe_at, "the time it was forced open is over")
                return
            waited = self._probe_at - (self._opened_at or 0.0)
            self._half_open(self._probe_at, f"{waited:g} s have passed, probes may go")

    def _half_open(self, at: float, why: str) -> None:
        self._probe_successes = 0
        self._checked = False
        self._change(HALF_OPEN, at, why)

    def _admit_probe(self, now: float) -> Permit | None:
        self._move(now)
        if self._state != HALF_OPEN:
            return self._pass
        if len(self._held(now)) >= self._settings.half_open_probes:
            return None
        permit = Permit(self._generation, probe=True, lease_ends=now + self._lease)
        self._probes.append(permit)
        return permit

    def _held(self, now: float) -> list[Permit]:
        """The probes under way, without those whose lease has run out."""
        if self._probes and self._probes[0].lease_ends <= now:
            self._probes = [permit for permit in self._probes if permit.lease_ends > now]
        return self._probes

    def _failed_while_closed(self, now: float, *, connected: bool) -> None:
        self._run += 1
        self._window.failures.add(now)
        settings = self._settings
        if not settings.enabled:
            return
        if self.forced is not None:
            self._move(now)
            if self.forced is not None:
                return
        why = self._tripping(now)
        if why is None:
            return
        if not settings.monitor_only:
            self._open_time = min(settings.open_for, settings.open_for_max)
            self._open(now, now + self._open_time, why, unreachable=not connected)
        elif now >= self._quiet_until:
            # Counted once per time it would have been open, not once per failure.
            self._quiet_until = now + settings.open_for
            self.would_open += 1
            if self._on_would_open is not None:
                self._on_would_open(now, why)

    def _tripping(self, now: float) -> str | None:
        """Why a failure opens it, or None. A few failures in a row count only while more than `failure_ratio` of the
        window failed, so that a flaky endpoint is not taken for a dead one; a window of nothing but failures always is.
        Many in a row always count: a busy healthy minute must not hide that the endpoint has died."""
        settings = self._settings
        failed = self._window.failures.total(now)
        total = failed + self._window.successes.total(now)
        limit = settings.failure_ratio * total
        if total >= settings.min_volume and failed >= limit:
            return f"{failed} of {total} calls failed within {settings.window:g} s"
        few = self._run >= settings.failure_threshold and (failed > limit or failed == total)
        if few or self._run >= settings.failures_in_a_row:
            return f"{self._run} calls in a row failed"
        return None

    def _probe_ended(self, permit: Permit, ok: bool, now: float, *, connected: bool) -> None:
        self._probes.remove(permit)
        settings = self._settings
        if not ok:
            self._last_failure_at = now
            self._open_time = min(self._open_time * 2.0 or settings.open_for, settings.open_for_max)
            # Where a connection can be made and calls fail all the same, connecting tells nothing: time does.
            self._open(now, now + self._open_time, "a probe failed", unreachable=not connected and not self._checked)
            return
        self._probe_successes += 1
        if self._probe_successes >= settings.success_threshold:
            self._close(now, f"{self._probe_successes} probes succeeded")

    def _open(self, now: float, until: float, why: str, *, unreachable: bool = False) -> None:
        self._opened_at = now
        self._unreachable = unreachable
        self._probe_at = until
        self._change(OPEN, now, why)

    def _close(self, now: float, why: str) -> None:
        """A closed breaker starts anew: what opened it must not open it again."""
        self._run = 0
        self._open_time = 0.0
        self._opened_at = None
        self._quiet_until = -inf
        self._window.clear()
        self._change(CLOSED, now, why)

    def _change(self, state: str, at: float, why: str) -> None:
        before, self._state = self._state, state
        self._generation += 1
        self._probes = []
        self._pass = Permit(self._generation, probe=False) if state == CLOSED else None
        if state != before:
            self._changed_at = at
            if self._on_change is not None:
                self._on_change(before, state, at, why)
