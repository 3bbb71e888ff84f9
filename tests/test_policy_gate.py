"""The rate-limit gate: one 429 holds back everyone with the same credential, in order."""

from config.breaker import RateLimitGate as Settings
from sidecar.policy.gate import Gate, Ticket


def gate(**changes: object) -> Gate:
    return Gate(Settings.model_validate(changes))


def entered(gate: Gate, key: bytes = b"k") -> Ticket:
    ticket = gate.enter(key)
    assert ticket is not None
    return ticket


def test_a_gate_nobody_paused_is_open() -> None:
    untouched = gate()
    assert not untouched.paused
    assert untouched.closed_until(b"k", 1.0) is None
    assert untouched.next_release() is None
    assert [] == untouched.release(1.0)


def test_a_pause_closes_the_gate_for_its_key_only_and_until_the_reset() -> None:
    paused = gate()
    paused.pause(b"k", 10.0, 1.0)
    assert paused.paused
    assert 10.0 == paused.closed_until(b"k", 9.9)
    assert paused.closed_until(b"other", 9.9) is None
    assert paused.closed_until(b"k", 10.0) is None
    assert not paused.paused


def test_a_pause_is_made_longer_and_never_shorter() -> None:
    paused = gate()
    paused.pause(b"k", 10.0, 1.0)
    paused.pause(b"k", 5.0, 2.0)
    assert 10.0 == paused.closed_until(b"k", 3.0)
    paused.pause(b"k", 20.0, 4.0)
    assert 20.0 == paused.closed_until(b"k", 5.0)
    assert 1 == paused.pauses


def test_a_wait_that_is_over_pauses_nothing() -> None:
    paused = gate()
    paused.pause(b"k", 1.0, 1.0)
    assert not paused.paused


def test_a_disabled_gate_never_closes() -> None:
    off = gate(enabled=False)
    off.pause(b"k", 10.0, 1.0)
    assert not off.paused


def test_calls_are_released_at_the_reset_in_the_order_they_came() -> None:
    paused = gate()
    paused.pause(b"k", 10.0, 1.0)
    tickets = [entered(paused) for _ in range(5)]
    assert 10.0 == paused.next_release()
    assert [] == paused.release(9.9)
    assert tickets == paused.release(10.0)
    assert all(ticket.released for ticket in tickets)
    assert (0, False) == (paused.waiting, bool(paused.paused))


def test_keys_are_released_in_the_order_of_their_resets() -> None:
    paused = gate()
    paused.pause(b"late", 20.0, 1.0)
    paused.pause(b"soon", 10.0, 1.0)
    late, soon = entered(paused, b"late"), entered(paused, b"soon")
    assert 10.0 == paused.next_release()
    assert [soon, late] == paused.release(30.0)


def test_whoever_comes_while_others_still_wait_queues_behind_them() -> None:
    paused = gate()
    paused.pause(b"k", 10.0, 1.0)
    first = entered(paused)
    assert 10.0 == paused.closed_until(b"k", 10.5), "the reset has passed, but the first has not been let go yet"
    second = entered(paused)
    assert [first, second] == paused.release(10.6)


def test_a_call_that_gives_up_leaves_the_order_of_the_others() -> None:
    paused = gate()
    paused.pause(b"k", 10.0, 1.0)
    first, second, third = (entered(paused) for _ in range(3))
    paused.leave(second)
    assert 2 == paused.waiting
    assert [first, third] == paused.release(10.0)
    assert not second.released


def test_leaving_twice_or_after_the_release_does_no_harm() -> None:
    paused = gate()
    paused.pause(b"k", 10.0, 1.0)
    first, second = entered(paused), entered(paused)
    paused.leave(first)
    paused.leave(first)
    assert 1 == paused.waiting
    paused.release(10.0)
    paused.leave(second)
    assert 0 == paused.waiting


def test_a_longer_pause_holds_back_those_who_wait_already() -> None:
    paused = gate()
    paused.pause(b"k", 10.0, 1.0)
    ticket = entered(paused)
    paused.pause(b"k", 30.0, 5.0)
    assert [] == paused.release(10.0)
    assert [ticket] == paused.release(30.0)


def test_a_pause_that_begins_again_before_anyone_was_let_go_is_counted() -> None:
    paused = gate()
    paused.pause(b"k", 10.0, 1.0)
    ticket = entered(paused)
    paused.pause(b"k", 30.0, 15.0)
    assert 2 == paused.pauses
    assert [] == paused.release(15.0)
    assert [ticket] == paused.release(30.0)


def test_the_queue_is_bounded_over_all_keys() -> None:
    paused = gate(max_queue=2)
    paused.pause(b"a", 10.0, 1.0)
    paused.pause(b"b", 10.0, 1.0)
    entered(paused, b"a")
    last = entered(paused, b"b")
    assert paused.enter(b"a") is None
    paused.leave(last)
    assert paused.enter(b"a") is not None


def test_without_a_queue_nobody_waits() -> None:
    paused = gate(max_queue=0)
    paused.pause(b"k", 10.0, 1.0)
    assert paused.enter(b"k") is None


def test_the_number_of_keys_is_bounded_and_those_somebody_waits_for_stay() -> None:
    paused = gate(max_queue=10)
    paused.pause(b"awaited", 5.0, 1.0)
    ticket = entered(paused, b"awaited")
    for number in range(3000):
        paused.pause(b"%d" % number, 100.0 + number, 1.0)
    assert 1024 == len(paused._pauses)
    assert paused.closed_until(b"0", 2.0) is None, "the soonest to end was dropped"
    assert 3099.0 == paused.closed_until(b"2999", 2.0)
    assert [ticket] == paused.release(5.0)
