"""Which clients are let through unopened, and for how long."""

from __future__ import annotations

from sidecar.policy.demotion import FIRST_FOR, LONGEST_FOR, Client, Demotions, Program

ONE = Client("api.test:443", "127.0.0.1", "pinning/1")
APP = Program("python app.py", "0a1b2c3d4e5f")
OTHER = ONE._replace(agent="trusting/1")


def test_a_refusal_demotes_at_once_and_for_a_while() -> None:
    demotions = Demotions()
    assert not demotions.demoted(ONE, 0.0)
    assert FIRST_FOR == demotions.refused(ONE, 100.0)
    assert demotions.demoted(ONE, 100.0 + FIRST_FOR - 1)
    assert not demotions.demoted(ONE, 100.0 + FIRST_FOR)
    assert not demotions.demoted(OTHER, 100.0)


def test_each_demotion_lasts_twice_as_long_up_to_an_hour() -> None:
    demotions = Demotions()
    assert [300, 600, 1200, 2400, LONGEST_FOR, LONGEST_FOR] == [demotions.refused(ONE, 0.0) for _ in range(6)]


def test_handshakes_that_nobody_uses_count_in_a_row_only() -> None:
    demotions = Demotions()
    assert None is demotions.unused(ONE, 0.0)
    demotions.used(ONE)
    assert None is demotions.unused(ONE, 0.0)
    assert FIRST_FOR == demotions.unused(ONE, 0.0)


def test_a_client_that_trusts_us_again_starts_afresh() -> None:
    demotions = Demotions()
    demotions.refused(ONE, 0.0)
    demotions.refused(ONE, 0.0)
    demotions.used(ONE)
    assert FIRST_FOR == demotions.refused(ONE, 0.0)


def test_only_so_many_are_remembered_the_newest() -> None:
    demotions = Demotions()
    clients = [ONE._replace(agent=str(number)) for number in range(1100)]
    for client in clients:
        demotions.refused(client, 0.0)
    assert not demotions.demoted(clients[0], 1.0)
    assert demotions.demoted(clients[-1], 1.0)


def test_programs_that_do_not_say_who_they_are_are_told_apart() -> None:
    demotions = Demotions()
    unnamed = ONE._replace(agent="")
    demotions.refused(unnamed._replace(program=APP), 0.0)
    assert demotions.demoted(unnamed._replace(program=APP), 1.0)
    assert not demotions.demoted(unnamed._replace(program=APP._replace(digest="other")), 1.0)
    assert not demotions.demoted(unnamed, 1.0)


def test_demotions_in_force_are_listed_with_their_times_and_reasons() -> None:
    demotions = Demotions()
    demotions.refused(ONE, 0.0, "unknown ca")
    demotions.refused(ONE, 400.0, "unknown ca again")
    demotions.refused(OTHER, 0.0, "pinned")
    demotions.unused(ONE._replace(agent="looks once"), 400.0)
    (only,) = demotions.in_force(400.0)
    assert (ONE, 400.0, 1000.0, 2, "unknown ca again") == only
    assert [] == demotions.in_force(1000.0)


def test_whoever_is_forgotten_is_opened_again_and_starts_afresh() -> None:
    demotions = Demotions()
    demotions.refused(ONE, 0.0)
    demotions.refused(OTHER, 0.0)
    demotions.forget([ONE])
    assert [OTHER] == [one.client for one in demotions.in_force(1.0)]
    assert FIRST_FOR == demotions.refused(ONE, 1.0)


def test_the_id_of_a_client_stays_and_is_its_own() -> None:
    clients = [ONE, OTHER, ONE._replace(program=APP), ONE._replace(host="api.test:8443")]
    assert len(clients) == len({client.id for client in clients})
    assert ONE.id == Client(*ONE).id
