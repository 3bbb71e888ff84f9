"""Who is let through unopened now: shown, cleared, and told by `check --host`."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.authority import Authority
from tests.doubles.faults import until
from tests.doubles.upstream import always, answer
from tests.test_admin import admin, at_fault, order
from tests.test_admin_access import OPERATOR, READER, bearer, token_file  # noqa: F401  # a fixture
from tests.test_cli_admin import here, url
from tests.test_intercept import Opened, authority, opened, pinned  # noqa: F401  # fixtures

OK = answer(b"secret")


async def refuse(its: Opened, authority: Authority, agent: str) -> None:  # noqa: F811
    before = its.demotions
    with pytest.raises(ssl.SSLCertVerificationError):
        await its.secure(pinned(authority), fields=f"User-Agent: {agent}\r\n")
    await until(lambda: its.demotions == before + 1)


async def seen(its: Opened, agent: str) -> bool:
    """Whether a client of this name, which trusts our authority and the upstream's, is opened."""
    context = its.trusting()
    context.load_verify_locations(its.sidecar.settings.upstreams["api"].ca_bundle)
    return None is not (await its.ask(its.get(), context=context, fields=f"User-Agent: {agent}\r\n")).get(
        "x-sidecar-outcome"
    )


async def test_whoever_is_let_through_is_shown_with_the_reason_and_the_time(opened: Any, authority: Authority) -> None:  # noqa: F811
    its = await opened(always(OK))
    told = (await admin(its.sidecar, "/interception")).json
    assert (["api.test"], None, [], 0) == (told["hosts"], told["impossible"], told["items"], told["total"])
    await refuse(its, authority, "pinning/1")
    (one,) = (await admin(its.sidecar, "/interception?host=api.test")).json["items"]
    assert ("api.test:443", "api", "127.0.0.1", "pinning/1", 1) == tuple(
        one[name] for name in ("host", "upstream", "address", "user_agent", "times")
    )
    assert one["since"] < one["until"]
    assert one["why"]
    assert [] == (await admin(its.sidecar, "/interception?host=other.test")).json["items"]


@pytest.mark.parametrize("which", ["api.test", "API.test:443", "id", "part of the id"])
async def test_whoever_is_cleared_is_opened_again_and_that_is_written_down(
    opened: Any,  # noqa: F811
    authority: Authority,  # noqa: F811
    which: str,
) -> None:
    its = await opened(always(OK))
    await refuse(its, authority, "pinning/1")
    assert not await seen(its, "pinning/1")
    (one,) = (await admin(its.sidecar, "/interception")).json["items"]
    meant = {"id": one["id"], "part of the id": one["id"][:6]}.get(which, which)
    cleared = (await order(its.sidecar, "/interception/clear", {"which": meant, "reason": "it has the CA now"})).json
    assert ([one], 1) == (cleared["items"], cleared["total"])
    assert await seen(its, "pinning/1")
    (entry,) = (await admin(its.sidecar, "/audit")).json["items"]
    assert ("local", "it has the CA now", "intercepted") == (entry["who"], entry["reason"], entry["after"])
    assert "api.test:443" in entry["about"]


async def test_one_is_cleared_and_the_other_stays(opened: Any, authority: Authority) -> None:  # noqa: F811
    its = await opened(always(OK))
    await refuse(its, authority, "one/1")
    await refuse(its, authority, "other/1")
    items = {one["user_agent"]: one for one in (await admin(its.sidecar, "/interception")).json["items"]}
    await order(its.sidecar, "/interception/clear", {"which": items["one/1"]["id"]})
    assert (True, False) == (await seen(its, "one/1"), await seen(its, "other/1"))
    assert 0 == (await order(its.sidecar, "/interception/clear", {"which": "else.test"})).json["total"]
    assert 1 == (await order(its.sidecar, "/interception/clear", {"all": True})).json["total"]


@pytest.mark.parametrize("body", [{}, {"which": "api.test", "all": True}])
async def test_whom_to_clear_is_said_in_one_way(opened: Any, body: Any) -> None:  # noqa: F811
    its = await opened(always(OK))
    assert ["which"] == at_fault(await order(its.sidecar, "/interception/clear", body))


async def test_who_may_only_look_does_not_clear(opened: Any, token_file: Path) -> None:  # noqa: F811
    its = await opened(always(OK), admin={"token_file": str(token_file)})
    assert 200 == (await admin(its.sidecar, "/interception", bearer(READER))).status
    fields = ["Content-Length: 13", "Content-Type: application/json"]
    for token, status in ((READER, 403), (OPERATOR, 200)):
        reply = await admin(
            its.sidecar, "/interception/clear", bearer(token), *fields, method="POST", body=b'{"all": true}'
        )
        assert status == reply.status


async def test_the_command_line_lists_and_clears(opened: Any, authority: Authority) -> None:  # noqa: F811
    its = await opened(always(OK))
    at = ("--admin", url(its.sidecar))
    assert "whatever is intercepted is opened" in (await here("interception", "list", *at)).out
    await refuse(its, authority, "pinning/1")
    listed = await here("interception", "list", *at)
    assert (0, True) == (listed.code, "pinning/1" in listed.out)
    assert "1 in all." in listed.err
    found = json.loads((await here("interception", "list", "--json", *at)).out)
    assert (1, "api.test:443") == (found["total"], found["items"][0]["host"])
    assert 2 == (await here("interception", "clear", *at)).code
    assert 2 == (await here("interception", "clear", "api.test", "--all", *at)).code
    cleared = await here("interception", "clear", "api.test", "--reason", "trusts us now", *at)
    assert (0, True) == (cleared.code, "opened again" in cleared.out)
    again = await here("interception", "clear", "api.test", *at)
    assert (0, True) == (again.code, "nothing to clear" in again.out)


async def test_check_tells_what_the_running_sidecar_does_now(
    opened: Any,  # noqa: F811
    authority: Authority,  # noqa: F811
    tmp_path: Path,
) -> None:
    its = await opened(always(OK))
    file = tmp_path / "checked.yaml"
    file.write_text("upstreams: {api: {hosts: [api.test, new.test], intercept: true}}")
    asked = ("check", "-c", str(file), "--admin", url(its.sidecar), "--host")
    assert "opens it for every client" in (await here(*asked, "https://api.test")).out
    await refuse(its, authority, "pinning/1")
    told = " ".join((await here(*asked, "api.test")).out.split())
    assert "lets 1 client through unopened: " in told
    assert "pinning/1" in told
    (way,) = json.loads((await here(*asked, "https://api.test", "--json")).out)["items"]
    assert (True, True, 1) == (way["now"]["answered"], way["now"]["intercepted"], len(way["now"]["demoted"]))
    assert "does not intercept new.test" in " ".join((await here(*asked, "https://new.test")).out.split())
    (its.ca.parent / "authority.pem").write_text("scratched")
    await its.ask(its.get(), context=pinned(authority))
    assert "lets everybody through" in " ".join((await here(*asked, "https://api.test")).out.split())


async def test_check_says_when_no_sidecar_answers(tmp_path: Path) -> None:
    file = tmp_path / "checked.yaml"
    file.write_text("upstreams: {api: {hosts: [api.test], intercept: true}}")
    asked = ("check", "-c", str(file), "--admin", "http://127.0.0.1:1", "--host")
    told = await here(*asked, "https://api.test")
    assert (0, True) == (told.code, "no sidecar answers at http://127.0.0.1:1" in " ".join(told.out.split()))
    (way,) = json.loads((await here(*asked, "https://api.test", "--json")).out)["items"]
    assert (False, None, []) == (way["now"]["answered"], way["now"]["intercepted"], way["now"]["demoted"])
    (way,) = json.loads((await here(*asked, "https://else.test", "--json")).out)["items"]
    assert None is way["now"], "what is no question of now is not asked"
