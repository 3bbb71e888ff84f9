"""The queue between the event loop and the thread that exports, where both take from it at once."""

from __future__ import annotations

from collections import deque

from telemetry.courier import Courier


class Snatched(deque[int]):
    """The other thread took the last entry between the look and the grab."""

    snatches = 0

    def popleft(self) -> int:
        if self.snatches:
            self.snatches -= 1
            self.clear()
            raise IndexError
        return super().popleft()


def courier(queue: Snatched, capacity: int = 2) -> tuple[Courier[int], list[list[int]], list[int]]:
    delivered: list[list[int]] = []
    lost: list[int] = []
    made = Courier("test", capacity, 10, 60.0, delivered.append, lost.append)
    made._queue = queue
    return made, delivered, lost


def test_what_the_thread_took_is_not_lost_and_the_new_entry_is_queued() -> None:
    queue = Snatched([1, 2])
    made, _, lost = courier(queue)
    made._begun = True  # no thread: its part is played by the queue
    queue.snatches = 1
    made.put(3)
    assert ([], [3]) == (lost, list(queue))


def test_what_the_loop_dropped_is_not_delivered() -> None:
    queue = Snatched([1])
    made, delivered, _ = courier(queue)
    queue.snatches = 1
    made._carry()
    assert [] == delivered


def test_a_courier_that_never_had_work_ends_at_once() -> None:
    made, delivered, lost = courier(Snatched())
    made.close(0.0)
    assert ([], []) == (delivered, lost)
