"""`sidecar policies`, `retries` and `reload`: what is in force, changed from a terminal and taken back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Running, Starter
from tests.test_cli_admin import ask


@pytest.fixture
async def sidecar(start_sidecar: Starter) -> Running:
    return await start_sidecar(policies={"careful": {"max_attempts": 2, "base_delay": 0.5}})


async def test_a_policy_is_changed_key_by_key_and_that_is_taken_back(sidecar: Running) -> None:
    shown = await ask(sidecar, "policies")
    assert 0 == shown.code
    assert "careful" in shown.out
    changed = await ask(sidecar, "policies", "set", "careful", "max_attempts=3", "jitter_type=none", "--reason", "try")
    assert (0, True) == (changed.code, "runtime" in changed.out)
    careful = sidecar.proxy.settings.policies["careful"]
    assert (3, 0.5, "none") == (careful.max_attempts, careful.base_delay, careful.jitter_type)
    removed = await ask(sidecar, "policies", "remove", "careful")
    assert 0 == removed.code
    assert 2 == sidecar.proxy.settings.policies["careful"].max_attempts


async def test_a_new_policy_can_be_made_and_removed(sidecar: Running) -> None:
    made = await ask(sidecar, "policies", "set", "gentle", "max_attempts=2", "--json")
    assert ("runtime", 2) == (json.loads(made.out)["origin"], json.loads(made.out)["policy"]["max_attempts"])
    unused = await ask(sidecar, "policies", "set", "gentle", "max_attempts=3")
    assert (0, True) == (unused.code, "Nothing uses gentle: " in unused.out)
    audit = [await ask(sidecar, "audit", "--what", what, "--json") for what in ("set", "force-open")]
    assert [2, 0] == [len(json.loads(told.out)["items"]) for told in audit]
    used = await ask(sidecar, "policies", "set", "default", "max_attempts=3")
    assert (0, False) == (used.code, "Nothing uses" in used.out)
    removed = await ask(sidecar, "policies", "remove", "gentle")
    assert (0, True) == (removed.code, "no policy gentle any more" in removed.out)
    assert "gentle" not in sidecar.proxy.settings.policies


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("set", "careful", "max_attemps=3"), 2, 'did you mean "max_attempts"?'),
        (("set", "careful", "max_attempts=99"), 2, "max_attempts"),
        (("set", "careful", "max_attempts"), 2, "is not KEY=VALUE"),
        (("set", "careful", "jitter_type=sometimes"), 2, "jitter_type"),
        (("remove", "nothing"), 1, "nothing"),
    ],
)
async def test_a_change_that_makes_no_sense_changes_nothing_and_is_told(
    sidecar: Running, arguments: tuple[str, ...], code: int, words: str
) -> None:
    before = sidecar.proxy.settings.policies
    ended = await ask(sidecar, "policies", *arguments)
    assert (code, True) == (ended.code, words in ended.err), ended
    assert before == sidecar.proxy.settings.policies


async def test_the_kill_switch_is_shown_and_turned(sidecar: Running) -> None:
    assert "Retries are on." in (await ask(sidecar, "retries")).out
    off = await ask(sidecar, "retries", "disable", "--reason", "a storm")
    assert (0, True, False) == (off.code, "nothing is sent a second time" in off.out, sidecar.proxy.retries_enabled)
    on = await ask(sidecar, "retries", "enable", "--json")
    assert json.loads(on.out)["retries_enabled"]


async def test_a_reload_tells_what_changed_and_what_waits_for_a_restart(start_sidecar: Starter, tmp_path: Path) -> None:
    file = tmp_path / "sidecar.yaml"
    sidecar = await start_sidecar(file=file, policies={"careful": {"max_attempts": 2}})
    keys = json.loads(file.read_text())
    keys["policies"]["careful"]["max_attempts"] = 3
    file.write_text(json.dumps({**keys, "admin": {"port": 1}}))
    first = await ask(sidecar, "reload", "--reason", "a test")
    assert (0, True) == (first.code, "policies.careful.max_attempts: 2 → 3" in first.out), first
    assert "Needs a restart: admin.port" in first.out
    assert 3 == sidecar.proxy.settings.policies["careful"].max_attempts
    second = json.loads((await ask(sidecar, "reload", "--json")).out)
    assert ([], ["admin.port"]) == (second["changed"], second["needs_restart"])
    same = await ask(sidecar, "reload")
    assert "Nothing changed: all else in the file is in force.\nNeeds a restart: admin.port\n" == same.out
    file.write_text(json.dumps({**keys, "upstreams": {"u": {"route": "/u", "endpoints": ["http://127.0.0.1:9"]}}}))
    added = json.loads((await ask(sidecar, "reload", "--json")).out)
    assert "upstreams.u.route" in [change["key"] for change in added["changed"]]
    assert "upstreams" not in [change["key"] for change in added["changed"]], "told twice"
    audit = (await ask(sidecar, "audit", "--limit", "1")).out
    assert "upstreams.u.route - → /u" in audit and "more" in audit and len(audit) < 1500
    assert "Nothing changed: the file is in force as it is.\n" == (await ask(sidecar, "reload")).out
    file.write_text("polices: {}\n")
    wrong = await ask(sidecar, "reload")
    assert (1, True) == (wrong.code, 'did you mean "policies"?' in wrong.err)


async def test_a_policy_is_set_for_a_while_and_says_how_long_it_has_left(sidecar: Running) -> None:
    changed = await ask(sidecar, "policies", "set", "careful", "max_attempts=3", "--for", "10m")
    assert (0, True) == (changed.code, "runtime, 10 min left" in changed.out), changed
    assert "runtime, 10 min left" in (await ask(sidecar, "policies")).out
