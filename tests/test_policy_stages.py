"""Attempts per stage of a workflow."""

from sidecar.policy.stages import StageBudgets


def budgets(ttl: float = 3600.0, capacity: int = 100, **stages: int) -> StageBudgets:
    return StageBudgets(stages, ttl, capacity)


def test_a_stage_has_five_attempts_unless_said_otherwise() -> None:
    some = budgets(fetch=8)
    assert (8, 5) == (some.limit("fetch"), some.limit("notify"))


def test_attempts_are_counted_per_workflow_and_stage() -> None:
    some = budgets()
    some.attempt("w1", "fetch", 1.0)
    some.attempt("w1", "fetch", 2.0)
    some.attempt("w1", "notify", 2.0)
    some.attempt("w2", "fetch", 2.0)
    assert (2, 1, 1, 0) == (
        some.made("w1", "fetch", 3.0),
        some.made("w1", "notify", 3.0),
        some.made("w2", "fetch", 3.0),
        some.made("w3", "fetch", 3.0),
    )


def test_a_stage_that_succeeded_begins_anew_and_the_others_do_not() -> None:
    some = budgets()
    some.attempt("w", "fetch", 1.0)
    some.attempt("w", "notify", 1.0)
    some.succeeded("w", "fetch")
    some.succeeded("w", "never seen")
    some.succeeded("never seen", "fetch")
    assert (0, 1) == (some.made("w", "fetch", 2.0), some.made("w", "notify", 2.0))


def test_a_workflow_is_forgotten_when_it_was_not_used_for_long_enough() -> None:
    some = budgets(ttl=60.0)
    some.attempt("w", "fetch", 0.0)
    some.attempt("w", "notify", 50.0)
    assert 1 == some.made("w", "fetch", 109.9)
    assert 0 == some.made("w", "fetch", 110.0)
    assert 0 == len(some)


def test_the_least_recently_used_workflow_goes_first_when_there_are_too_many() -> None:
    some = budgets(capacity=2)
    some.attempt("old", "fetch", 1.0)
    some.attempt("kept", "fetch", 2.0)
    some.attempt("old", "fetch", 3.0)
    some.attempt("new", "fetch", 4.0)
    assert (2, 0, 1) == tuple(some.made(name, "fetch", 5.0) for name in ("old", "kept", "new"))


def test_one_workflow_cannot_have_any_number_of_stages() -> None:
    some = budgets()
    for number in range(1000):
        some.attempt("w", f"stage{number}", 1.0)
    assert (0, 1) == (some.made("w", "stage0", 1.0), some.made("w", "stage999", 1.0))
    assert 64 == len(some._workflows["w"].attempts)
