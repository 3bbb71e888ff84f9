"""The registry as one configuration sees it: the built-in codes, with its own additions and changes."""

import pytest

from config.errors import registry, registry_of
from config.model import Settings
from config.policy import SHIPPED

ADDED = {
    "CARD_DECLINED": {"category": "PERMANENT", "retry": "fatal", "description": "The bank refused the card."},
    "CONFLICT": {"retry": "retryable", "policy": "patient"},
}


@pytest.fixture
def settings() -> Settings:
    return Settings.model_validate({"error_codes": ADDED})


def test_without_additions_it_is_the_built_in_one() -> None:
    assert registry() is registry_of(Settings())


def test_a_change_leaves_everything_else_as_it_is(settings: Settings) -> None:
    before, after = registry()["CONFLICT"], registry_of(settings)["CONFLICT"]
    assert ("retryable", "patient") == (after.retry, after.policy)
    assert (before.category, before.status, before.description, before.causes, before.related) == (
        after.category,
        after.status,
        after.description,
        after.causes,
        after.related,
    )


def test_an_added_code_gets_what_it_does_not_say(settings: Settings) -> None:
    added = registry_of(settings)["CARD_DECLINED"]
    assert ("CARD_DECLINED", "PERMANENT", "fatal", "The bank refused the card.") == (
        added.code,
        added.category,
        added.retry,
        added.description,
    )
    assert (502, "medium", None, (), (), ()) == (
        added.status,
        added.severity,
        added.policy,
        added.causes,
        added.examples,
        added.related,
    )
    assert added.resolution


def test_every_code_is_there_and_the_built_in_registry_is_untouched(settings: Settings) -> None:
    assert registry().keys() | {"CARD_DECLINED"} == registry_of(settings).keys()
    assert "CARD_DECLINED" not in registry()
    assert "conditional" == registry()["CONFLICT"].retry


def test_it_cannot_be_changed(settings: Settings) -> None:
    with pytest.raises(TypeError):
        registry_of(settings)["NEW"] = registry()["CONFLICT"]  # type: ignore[index]  # that it cannot is the point


def test_the_policies_that_codes_name_are_shipped() -> None:
    assert {
        "NETWORK_TIMEOUT": "NETWORK_TIMEOUT",
        "DATABASE_CONNECTION_ERROR": "DATABASE_CONNECTION_ERROR",
        "RATE_LIMIT_EXCEEDED": "RATE_LIMIT_EXCEEDED",
        "QUOTA_EXCEEDED": "RATE_LIMIT_EXCEEDED",
    } == {code: entry.policy for code, entry in registry().items() if entry.policy is not None}
    assert {entry.policy for entry in registry().values()} - {None} <= SHIPPED.keys()


def test_a_code_that_is_never_sent_again_has_no_policy() -> None:
    assert [] == [code for code, entry in registry().items() if entry.retry == "fatal" and entry.policy is not None]


def test_every_code_shows_what_it_looks_like() -> None:
    assert [] == [code for code, entry in registry().items() if not entry.examples]
    assert [] == [text for entry in registry().values() for text in entry.examples if not text.endswith(".")]


def test_every_key_of_a_code_can_be_changed() -> None:
    everything = {
        "category": "CRITICAL",
        "severity": "critical",
        "retry": "conditional",
        "status": 599,
        "description": "d",
        "causes": ("c",),
        "resolution": "r",
        "examples": ("e",),
        "related": ("CONFLICT",),
        "policy": "patient",
    }
    changed = registry_of(Settings.model_validate({"error_codes": {"NOT_FOUND": everything}}))["NOT_FOUND"]
    assert everything == {key: getattr(changed, key) for key in everything}
