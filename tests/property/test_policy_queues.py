"""Order and bounds of the two queues, against plain lists."""

from hypothesis import given
from hypothesis import strategies as st

from config.breaker import RateLimitGate as Settings
from sidecar.policy.concurrency import Bulkhead, Place
from sidecar.policy.gate import Gate, Ticket
from tests.property import calm


@calm
@given(
    st.integers(1, 4), st.integers(0, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=80)
)
def test_the_bulkhead_is_never_overfull_and_first_come_is_first_served(
    places: int, queue: int, steps: list[tuple[bool, int]]
) -> None:
    bulkhead = Bulkhead(places, queue)
    holding: list[Place] = []
    waiting: list[Place] = []
    for comes, which in steps:
        if comes:
            place = bulkhead.enter()
            if len(holding) < places:
                assert place is not None
                assert place.granted
                holding.append(place)
            elif len(waiting) < queue:
                assert place is not None
                assert not place.granted
                waiting.append(place)
            else:
                assert place is None
        elif waiting and which % 2:
            assert bulkhead.leave(waiting.pop(which % len(waiting))) is None
        elif holding:
            following = bulkhead.leave(holding.pop(which % len(holding)))
            if waiting:
                assert waiting.pop(0) is following
                assert following.granted
                holding.append(following)
            else:
                assert following is None
        assert (len(holding), len(waiting)) == (bulkhead.in_flight, bulkhead.waiting)


@calm
@given(
    st.integers(0, 5),
    st.lists(
        st.tuples(
            st.sampled_from(["pause", "call", "call", "leave", "release"]),
            st.sampled_from([b"a", b"b"]),
            st.integers(0, 20),
        ),
        max_size=100,
    ),
)
def test_the_gate_releases_each_key_in_order_and_never_before_its_reset(
    queue: int, steps: list[tuple[str, bytes, int]]
) -> None:
    gate = Gate(Settings(max_queue=queue))
    until: dict[bytes, float] = {}
    lines: dict[bytes, list[Ticket]] = {b"a": [], b"b": []}
    for now, (what, key, number) in enumerate(steps):
        if what == "pause":
            gate.pause(key, now + number, now)
            if number:
                until[key] = max(until.get(key, 0.0), now + number)
        elif what == "call":
            closed = until.get(key, 0.0) > now or bool(lines[key])
            assert closed == (gate.closed_until(key, now) is not None)
            if closed:
                ticket = gate.enter(key)
                assert (ticket is None) == (sum(map(len, lines.values())) >= queue)
                if ticket is not None:
                    lines[key].append(ticket)
        elif what == "leave" and lines[key]:
            gate.leave(lines[key].pop(number % len(lines[key])))
        elif what == "release":
            free = gate.release(now)
            for name, line in lines.items():
                due = line if until.get(name, 0.0) <= now else []
                assert due == [ticket for ticket in free if ticket.key == name]
                if due:
                    lines[name] = []
        assert sum(map(len, lines.values())) == gate.waiting
