"""The rolling count against the obvious one, which remembers everything."""

from hypothesis import given
from hypothesis import strategies as st

from sidecar.policy.window import TICKS, RollingCount, Window
from tests.property import calm

steps = st.lists(
    st.tuples(st.floats(min_value=0.0, max_value=30.0), st.sampled_from(["add", "look"])), min_size=1, max_size=300
)
windows = st.floats(min_value=0.01, max_value=600.0)


def tick_of(now: float, window: float) -> int:
    return int(now * (TICKS / window) // 1)


@calm
@given(windows, steps)
def test_the_count_is_that_of_a_list_of_all_events_read_in_ticks(window: float, steps: list[tuple[float, str]]) -> None:
    counted, seen, now = RollingCount(window), [], 0.0
    for gap, what in steps:
        now += gap
        if what == "add":
            counted.add(now)
            seen.append(tick_of(now, window))
        expected = sum(tick_of(now, window) - tick < TICKS for tick in seen)
        assert expected == counted.total(now)


@calm
@given(windows, steps)
def test_an_event_counts_no_longer_than_the_window_and_at_most_a_tick_less(
    window: float, steps: list[tuple[float, str]]
) -> None:
    counted, seen, now = RollingCount(window), [], 0.0
    for gap, _ in steps:
        now += gap
        counted.add(now)
        seen.append(now)
        hair = 1e-9 * (now + window)  # floats cannot say on which side of a border a moment lies
        surely = sum(now - moment < window * (1 - 1 / TICKS) - hair for moment in seen)
        perhaps = sum(now - moment < window + hair for moment in seen)
        assert surely <= counted.total(now) <= perhaps


@calm
@given(windows, st.lists(st.tuples(st.floats(min_value=0.0, max_value=2.0), st.booleans()), max_size=200))
def test_the_ratio_is_that_of_the_two_counts(window: float, calls: list[tuple[float, bool]]) -> None:
    both, seen, now = Window(window), [], 0.0
    for gap, ok in calls:
        now += gap
        (both.successes if ok else both.failures).add(now)
        seen.append((tick_of(now, window), ok))
        alive = [worked for tick, worked in seen if tick_of(now, window) - tick < TICKS]
        assert alive.count(False) / len(alive) == both.ratio(now)


@calm
@given(st.integers(min_value=1, max_value=5000))
def test_memory_is_bounded_by_the_ticks(events: int) -> None:
    counted = RollingCount(1.0)
    for number in range(events):
        counted.add(number / 777)
    assert len(counted._past) <= TICKS
