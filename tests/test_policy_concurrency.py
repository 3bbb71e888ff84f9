"""Places for requests under way, and the queue for them."""

from sidecar.policy.concurrency import Bulkhead, Place


def entered(bulkhead: Bulkhead) -> Place:
    place = bulkhead.enter()
    assert place is not None
    return place


def test_as_many_as_there_are_places_go_at_once() -> None:
    bulkhead = Bulkhead(2)
    assert (True, True) == (entered(bulkhead).granted, entered(bulkhead).granted)
    assert bulkhead.enter() is None
    assert 2 == bulkhead.in_flight


def test_a_place_that_is_given_up_can_be_taken_again() -> None:
    bulkhead = Bulkhead(1)
    place = entered(bulkhead)
    assert bulkhead.leave(place) is None
    assert 0 == bulkhead.in_flight
    assert entered(bulkhead).granted


def test_whoever_finds_no_place_waits_up_to_the_length_of_the_queue() -> None:
    bulkhead = Bulkhead(1, max_queue=2)
    entered(bulkhead)
    assert (False, False) == (entered(bulkhead).granted, entered(bulkhead).granted)
    assert bulkhead.enter() is None
    assert 2 == bulkhead.waiting


def test_places_go_to_those_who_wait_in_the_order_they_came() -> None:
    bulkhead = Bulkhead(1, max_queue=10)
    first = entered(bulkhead)
    waiting = [entered(bulkhead) for _ in range(3)]
    served = []
    holder: Place | None = first
    while holder is not None:
        holder = bulkhead.leave(holder)
        if holder is not None:
            assert holder.granted
            served.append(holder)
    assert waiting == served
    assert (0, 0) == (bulkhead.in_flight, bulkhead.waiting)


def test_nobody_who_comes_later_overtakes_those_who_wait() -> None:
    bulkhead = Bulkhead(1, max_queue=1)
    holder = entered(bulkhead)
    waiting = entered(bulkhead)
    assert waiting is bulkhead.leave(holder)
    assert 0 == bulkhead.waiting
    assert not entered(bulkhead).granted, "the place went to the one who waited"


def test_whoever_stops_waiting_leaves_the_order_of_the_others() -> None:
    bulkhead = Bulkhead(1, max_queue=3)
    holder = entered(bulkhead)
    first, second, third = (entered(bulkhead) for _ in range(3))
    assert bulkhead.leave(second) is None
    assert 1 == bulkhead.in_flight
    assert first is bulkhead.leave(holder)
    assert third is bulkhead.leave(first)
