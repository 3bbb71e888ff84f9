"""The breaker against a naive one that keeps every event and derives everything from them each time."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from config.breaker import Breaker as Settings
from sidecar.policy.breaker import CLOSED, HALF_OPEN, OPEN, Breaker, Permit
from sidecar.policy.window import TICKS
from tests.property import calm

LEASE = 50.0
# Binary fractions, so that sums of times are exact and a border is a border in both.
gaps = st.sampled_from([0.0, 0.125, 1.0, 7.5, 29.875, 30.0, 60.0, 61.0, 400.0])


@dataclass
class Naive:
    """Epochs instead of generations, lists instead of counters, and no shared permits."""

    settings: Settings
    now: float = 0.0
    state: str = CLOSED
    epoch: int = 0
    results: list[tuple[float, bool]] = field(default_factory=list)
    opened: float = 0.0
    lasts: float = 0.0
    trips: int = 0
    forced_until: float | None = None
    leases: dict[int, float] = field(default_factory=dict)
    good_probes: int = 0
    number: int = 0
    would_open: int = 0
    quiet_until: float = -1.0
    last_failure: float | None = None
    unreachable: bool = False
    checked: bool = False

    def enter(self, state: str) -> None:
        self.state = state
        self.checked = False
        self.epoch += 1
        self.leases = {}
        self.good_probes = 0
        if state == CLOSED:
            self.results = []
            self.trips = 0
            self.quiet_until = -1.0

    def pass_time(self) -> None:
        if self.forced_until is not None and self.now >= self.forced_until:
            self.forced_until = None
        if self.state == OPEN and self.now >= self.opened + self.lasts:
            self.enter(CLOSED if self.settings.monitor_only or not self.settings.enabled else HALF_OPEN)
        self.leases = {probe: since for probe, since in self.leases.items() if self.now < since + LEASE}

    def admit(self) -> tuple[int, int] | None:
        """(epoch, number of the probe or 0)."""
        self.pass_time()
        if self.state == CLOSED:
            return (self.epoch, 0)
        if self.state == HALF_OPEN and len(self.leases) < self.settings.half_open_probes:
            self.number += 1
            self.leases[self.number] = self.now
            return (self.epoch, self.number)
        return None

    def trip(self) -> None:
        self.opened = self.now
        self.lasts = min(self.settings.open_for * 2**self.trips, self.settings.open_for_max)
        self.trips += 1
        self.enter(OPEN)

    def record(
        self, permit: tuple[int, int], ok: bool, failed_in: set[int] | None = None, *, connected: bool = True
    ) -> None:
        """`failed_in`: the epochs in which the same request has failed before."""
        self.pass_time()
        epoch, probe = permit
        if epoch != self.epoch or (probe and probe not in self.leases):
            return
        if not ok:
            self.last_failure = self.now
            self.unreachable = not connected
        if self.state == HALF_OPEN:
            del self.leases[probe]
            self.good_probes += ok
            if not ok:
                self.unreachable = not connected and not self.checked
                self.trip()
            elif self.good_probes == self.settings.success_threshold:
                self.enter(CLOSED)
            return
        if failed_in is not None and epoch in failed_in:
            if not ok:
                return
            self.take_back()
        self.results.append((self.now, ok))
        if not ok and failed_in is not None:
            failed_in.add(epoch)
        if not ok and self.settings.enabled and self.forced_until is None and self.should_open():
            if not self.settings.monitor_only:
                self.trip()
            elif self.now >= self.quiet_until:
                self.quiet_until = self.now + self.settings.open_for
                self.would_open += 1

    def take_back(self) -> None:
        """The newest failure that still counts was none after all."""
        for index in reversed(range(len(self.results))):
            at, ok = self.results[index]
            if not ok:
                if self.counts(at):
                    del self.results[index]
                return

    def connect(self) -> None:
        self.pass_time()
        if self.state == OPEN and self.unreachable and self.forced_until is None and self.settings.connect_check:
            self.enter(HALF_OPEN)
            self.checked = True

    def counts(self, at: float) -> bool:
        rate = TICKS / self.settings.window
        return self.now * rate // 1 - at * rate // 1 < TICKS

    def window(self) -> list[bool]:
        return [ok for at, ok in self.results if self.counts(at)]

    def should_open(self) -> bool:
        seen = self.window()
        ratio = seen.count(False) / len(seen)
        run = 0
        for _, ok in reversed(self.results):
            if ok:
                break
            run += 1
        enough = len(seen) >= self.settings.min_volume and ratio >= self.settings.failure_ratio
        in_a_row = run >= self.settings.failure_threshold
        if run >= self.settings.failures_in_a_row:
            return True
        return enough or (in_a_row and (ratio > self.settings.failure_ratio or ratio == 1.0))

    def abandon(self, permit: tuple[int, int], waited: float | None) -> None:
        slow = self.settings.slow_after
        if waited is not None and slow is not None and waited >= slow:
            self.record(permit, False)
        elif permit[0] == self.epoch:
            self.leases.pop(permit[1], None)


class BreakerAgainstNaive(RuleBasedStateMachine):
    permits = Bundle("permits")

    @initialize(
        ratio=st.sampled_from([0.25, 0.5, 1.0]),
        volume=st.sampled_from([1, 3, 6, 1000]),
        row=st.integers(1, 5),
        long_row=st.sampled_from([4, 7, 20]),
        check=st.booleans(),
        probes=st.integers(1, 3),
        successes=st.integers(1, 3),
        open_for_max=st.sampled_from([100.0, 300.0]),
        slow=st.sampled_from([None, 2.0]),
        monitor=st.sampled_from([False] * 7 + [True]),
        enabled=st.sampled_from([True] * 7 + [False]),
    )
    def begin(
        self,
        ratio: float,
        volume: int,
        row: int,
        long_row: int,
        check: bool,
        probes: int,
        successes: int,
        open_for_max: float,
        slow: float | None,
        monitor: bool,
        enabled: bool,
    ) -> None:
        chosen = Settings(
            failure_ratio=ratio,
            min_volume=volume,
            failure_threshold=row,
            failures_in_a_row=long_row,
            connect_check=check,
            open_for=30.0,
            half_open_probes=probes,
            success_threshold=successes,
            open_for_max=open_for_max,
            slow_after=slow,
            monitor_only=monitor,
            enabled=enabled,
        )
        self.told: list[tuple[str, str, float]] = []
        self.breaker = Breaker(chosen, lambda *change: self.told.append(change[:3]), lease=LEASE)
        self.naive = Naive(chosen)

    @rule(gap=gaps)
    def wait(self, gap: float) -> None:
        self.naive.now += gap

    @rule(target=permits)
    def admit(self) -> tuple[Permit | None, tuple[int, int] | None]:
        expected, given = self.naive.admit(), self.breaker.admit(self.naive.now)
        assert (expected is None) == (given is None)
        return given, expected

    @rule(pair=consumes(permits), ok=st.booleans(), connected=st.booleans())
    def record(self, pair: tuple[Permit | None, tuple[int, int] | None], ok: bool, connected: bool = True) -> None:
        permit, known = pair
        if permit is not None and known is not None:
            self.naive.record(known, ok, connected=connected)
            self.breaker.record(permit, ok, self.naive.now, connected=connected)

    @rule(words=st.lists(st.tuples(st.booleans(), gaps), min_size=2, max_size=4))
    def one_request_makes_several_attempts(self, words: list[tuple[bool, float]]) -> None:
        blamed: list[Permit] = []
        failed_in: set[int] = set()
        for ok, gap in words:
            permit, known = self.admit()
            if permit is not None and known is not None:
                self.naive.record(known, ok, failed_in)
                self.breaker.record(permit, ok, self.naive.now, blamed)
            self.naive.now += gap

    @rule()
    def somebody_could_connect(self) -> None:
        self.naive.connect()
        self.breaker.connected(self.naive.now)

    @rule(ok=st.sampled_from([True, False, False]), times=st.integers(1, 6))
    def call_at_once(self, ok: bool, times: int) -> None:
        for _ in range(times):
            self.record(self.admit(), ok)

    @rule(pair=consumes(permits), waited=st.sampled_from([None, 0.5, 3.0]))
    def abandon(self, pair: tuple[Permit | None, tuple[int, int] | None], waited: float | None) -> None:
        permit, known = pair
        if permit is not None and known is not None:
            self.naive.abandon(known, waited)
            self.breaker.abandon(permit, self.naive.now, waited)

    @rule()
    def wait_for_the_next_probe(self) -> None:
        self.naive.pass_time()
        if self.naive.state == OPEN:
            self.naive.now = self.naive.opened + self.naive.lasts

    # One rule for all orders, or they would come so often that nothing else ever gets far.
    @rule(what=st.sampled_from(["open", "closed", "reset"]), ttl=st.sampled_from([1.0, 45.0, 200.0]))
    def order(self, what: str, ttl: float) -> None:
        naive, now = self.naive, self.naive.now
        naive.pass_time()
        naive.forced_until = None if what == "reset" else now + ttl
        if what == "open":
            naive.opened, naive.lasts, naive.trips = now, ttl, 0
            naive.enter(OPEN)
            self.breaker.force_open(now, "ordered", ttl)
        else:
            naive.enter(CLOSED)
            if what == "reset":
                self.breaker.reset(now)
            else:
                self.breaker.force_close(now, "ordered", ttl)

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "naive"):
            return
        naive, now = self.naive, self.naive.now
        naive.pass_time()
        shown = self.breaker.snapshot(now)
        assert naive.state == shown.state
        assert len(naive.leases) == shown.probes
        assert naive.would_open == shown.would_open
        assert naive.last_failure == shown.last_failure_at
        assert (naive.forced_until is None) == (shown.forced is None)
        if naive.state == CLOSED:
            seen = naive.window()
            assert (seen.count(False), seen.count(True)) == (shown.failure_count, shown.success_count)
        elif naive.state == OPEN:
            assert naive.opened + naive.lasts - now == self.breaker.retry_in(now)

    @invariant()
    def every_change_follows_from_the_one_before_and_no_time_goes_back(self) -> None:
        for (_, after, at), (before, _, later) in zip(
            getattr(self, "told", []), getattr(self, "told", [])[1:], strict=False
        ):
            assert after == before
            assert at <= later


TestBreakerAgainstNaive = BreakerAgainstNaive.TestCase
TestBreakerAgainstNaive.settings = settings(calm, max_examples=300, stateful_step_count=60)
