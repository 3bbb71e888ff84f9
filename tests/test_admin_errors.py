"""The pages of the error codes, as a browser gets them: readable, self-contained, and nothing can be slipped in."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from config.errors import registry
from sidecar.admin import error_page
from tests.conftest import Running, Starter
from tests.doubles.app import Reply
from tests.test_admin import admin

BROWSER = "Accept: text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"


class Page(HTMLParser):
    """What a browser makes of it: text, links, tags, and every attribute that could fetch or run something."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.suspicious: list[str] = []
        self.text = ""
        self.style = ""
        self._open: list[str] = []
        self.feed(reply.body.decode())
        assert [] == self._open, "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "img"):
            self._open.append(tag)
        for name, value in attrs:
            if tag == "a" and name == "href":
                self.links.append(value or "")
            elif name in ("src", "href", "style", "srcset", "action") or name.startswith("on"):
                self.suspicious.append(f"{tag} {name}")

    def handle_endtag(self, tag: str) -> None:
        assert tag == self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            self.style += data
        else:
            self.text += data


@pytest.fixture
async def sidecar(start_sidecar: Starter) -> Running:
    nasty = {
        "category": "TRANSIENT",
        "retry": "retryable",
        "description": "<script>alert(1)</script> & `a<b`",
        "causes": ['"><img src=x onerror=alert(1)>'],
    }
    return await start_sidecar(error_codes={"NASTY": nasty})


async def test_a_browser_gets_a_page_that_says_all_the_registry_knows(sidecar: Running) -> None:
    reply = await admin(sidecar, "/errors/CIRCUIT_OPEN", BROWSER)
    assert (200, "text/html; charset=utf-8", "Accept") == (reply.status, reply.get("content-type"), reply.get("vary"))
    page, entry = Page(reply), registry()["CIRCUIT_OPEN"]
    for text in (entry.code, entry.description, *entry.causes, entry.resolution, *entry.examples, str(entry.status)):
        assert text.replace("`", "") in page.text
    assert ["/errors", *(f"/errors/{code}" for code in entry.related)] == page.links
    assert "code" in page.tags


async def test_a_code_with_a_policy_of_its_own_names_it(sidecar: Running) -> None:
    page = Page(await admin(sidecar, "/errors/NETWORK_TIMEOUT", BROWSER))
    assert "policyNETWORK_TIMEOUT" in page.text
    assert "sent again when that is safe" in page.text


async def test_everyone_else_gets_json(sidecar: Running) -> None:
    for accept in ((), ("Accept: */*",), ("Accept: application/json",)):
        reply = await admin(sidecar, "/errors/CIRCUIT_OPEN", *accept)
        assert ("application/json", "Accept") == (reply.get("content-type"), reply.get("vary"))
        assert "CIRCUIT_OPEN" == reply.json["code"]


async def test_the_overview_links_to_every_page_and_every_link_leads_somewhere(sidecar: Running) -> None:
    page = Page(await admin(sidecar, "/errors", BROWSER))
    assert [f"/errors/{code}" for code in (*registry(), "NASTY")] == page.links
    for link in page.links[::10]:
        assert 200 == (await admin(sidecar, link, BROWSER)).status


async def test_a_page_brings_all_it_needs_and_may_run_and_fetch_nothing(sidecar: Running) -> None:
    for path in ["/errors", "/errors/NO_ROUTE", "/errors/NASTY", "/errors/NONE"]:
        reply = await admin(sidecar, path, BROWSER)
        page = Page(reply)
        assert [] == page.suspicious
        assert not {"script", "iframe", "object", "link", "img", "form"} & set(page.tags)
        assert "url(" not in page.style and "@import" not in page.style
        policy = dict(part.split(None, 1) for part in reply.get("content-security-policy").split("; "))
        assert ("'none'", "'none'", "'none'") == (policy["default-src"], policy["frame-ancestors"], policy["base-uri"])
        (hashed,) = re.findall(r"'sha256-([^']+)'", policy["style-src"])
        assert base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode() == hashed
        assert "nosniff" == reply.get("x-content-type-options")


async def test_text_of_the_configuration_is_escaped(sidecar: Running) -> None:
    reply = await admin(sidecar, "/errors/NASTY", BROWSER)
    page = Page(reply)
    assert "<script>alert(1)</script> & a<b" in page.text
    assert '"><img src=x onerror=alert(1)>' in page.text
    assert b"<code>a&lt;b</code>" in reply.body
    assert "script" not in page.tags and "img" not in page.tags


async def test_an_unknown_code_is_a_page_too_and_escaped(sidecar: Running) -> None:
    reply = await admin(sidecar, "/errors/CIRCUT_OPEN", BROWSER)
    assert (404, "text/html; charset=utf-8") == (reply.status, reply.get("content-type"))
    assert "/errors/CIRCUIT_OPEN" in Page(reply).links
    nasty = await admin(sidecar, "/errors/%3Cscript%3Ealert(1)%3C%2Fscript%3E", BROWSER)
    assert 404 == nasty.status
    page = Page(nasty)
    assert "script" not in page.tags
    assert "<script>" in page.text


def test_what_passes_is_never_called_lost() -> None:
    passing = [entry for entry in registry().values() if entry.category == "TRANSIENT"]
    assert any(entry.retry == "fatal" for entry in passing)
    assert [] == [entry.code for entry in passing if "never sent again" in error_page.of(entry)]
