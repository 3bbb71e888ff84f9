"""Counting what happened lately."""

from sidecar.policy.window import TICKS, RollingCount, Window


def test_events_count_until_the_window_has_passed_and_then_not_at_all() -> None:
    counted = RollingCount(10.0)
    counted.add(100.0)
    counted.add(100.0)
    counted.add(104.0)
    assert 3 == counted.total(109.9)
    assert 1 == counted.total(110.0)
    assert 0 == counted.total(114.0)


def test_an_old_count_is_forgotten_however_long_nobody_looked() -> None:
    counted = RollingCount(10.0)
    counted.add(1.0)
    assert 0 == counted.total(1e9)


def test_a_moment_before_the_newest_one_is_taken_as_the_newest() -> None:
    counted = RollingCount(10.0)
    counted.add(50.0)
    counted.add(45.0)
    assert 2 == counted.total(59.9)
    assert 2 == counted.total(40.0)
    assert 0 == counted.total(60.0)


def test_a_tick_ends_as_a_whole() -> None:
    counted = RollingCount(float(TICKS))  # one tick is one second
    counted.add(5.0)
    counted.add(5.9)
    assert 2 == counted.total(5.0 + TICKS - 0.001)
    assert 0 == counted.total(5.0 + TICKS)


def test_an_empty_window_has_no_failures() -> None:
    window = Window(60.0)
    assert 0.0 == window.ratio(1.0)
    window.successes.add(1.0)
    assert 0.0 == window.ratio(1.0)


def test_the_ratio_is_the_share_of_failures_and_clearing_forgets_it() -> None:
    window = Window(60.0)
    for _ in range(3):
        window.successes.add(1.0)
    window.failures.add(2.0)
    assert 0.25 == window.ratio(2.0)
    window.clear()
    assert 0.0 == window.ratio(2.0)
    assert 0 == window.successes.total(2.0)


def test_an_event_that_was_none_is_taken_back_and_the_others_expire_in_their_time() -> None:
    counted = RollingCount(10.0)
    counted.add(100.0)
    counted.add(104.0)
    counted.remove(106.0)
    assert 1 == counted.total(109.9)
    assert 0 == counted.total(110.0)
    counted.remove(110.0)
    assert 0 == counted.total(110.0)
    counted.add(111.0)
    assert 1 == counted.total(111.0)
