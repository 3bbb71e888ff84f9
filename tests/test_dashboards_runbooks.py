"""A runbook for each alert, and nothing in it that does not work: every command is given to a sidecar in trouble."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sidecar.cli.parser import parser
from tests.conftest import Running, Starter, UpstreamStarter
from tests.doubles.prometheus import OPENER
from tests.doubles.upstream import Talk, answer
from tests.test_cli_admin import here, url
from tests.test_dashboards_names import EVERY_RULE, FOLDER

ALERTS = [rule["alert"] for rule in EVERY_RULE if "alert" in rule]
RUNBOOKS = sorted((FOLDER / "runbooks").glob("*.md"))
every_runbook = pytest.mark.parametrize("page", RUNBOOKS, ids=[path.stem for path in RUNBOOKS])

# Commands that would end or replace what is tested here, or need a terminal: that their words are right is checked.
NOT_RUN = {"top", "restore", "run"}


def commands(text: str) -> list[str]:
    """What a person would type: the lines after a prompt, and whatever else is set as code and begins like one."""
    typed = re.findall(r"^\$ (.+)$", text, re.MULTILINE)
    inline = [
        " ".join(code.split())
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S))
    ]
    orders = [
        f"curl -X {each.replace(' /', ' http://127.0.0.1:4141/')}" for each in inline if each.startswith("POST /")
    ]
    return [each for each in (*typed, *inline, *orders) if each.startswith(("curl ", "sidecar "))]


def texts() -> Iterator[tuple[str, str]]:
    """Everything of ours that tells a person what to type: where, and the text."""
    for page in RUNBOOKS:
        yield page.stem, page.read_text(encoding="utf-8")
    for path in sorted(FOLDER.glob("sidecar-*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            yield f"{path.stem}, {panel['title']}", panel.get("description", "")


# ---- their form --------------------------------------------------------------------------------------------------


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert sorted(ALERTS) == [path.stem for path in RUNBOOKS]


@every_runbook
def test_a_runbook_has_symptom_meaning_first_command_and_verification(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert f"# {page.stem}" == text.splitlines()[0]
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert ["Symptom", "Meaning", "First command", "Verification"] == headings
    for section in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert len(section.strip()) > 40
    first, verification = text.split("## First command")[1].split("## Verification")
    assert "```console\n$ " in first
    assert "```console\n$ " in verification


@every_runbook
def test_a_runbook_can_be_served_as_a_template_of_prometheus(page: Path) -> None:
    assert "{{" not in page.read_text(encoding="utf-8")


@every_runbook
def test_a_panel_that_a_runbook_names_exists(page: Path) -> None:
    boards = " ".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("sidecar-*.json"))
    titles = set(re.findall(r'"title": "([^"]+)"', boards))
    for named in re.findall(r"«([^»]+)»", " ".join(page.read_text(encoding="utf-8").split())):
        assert any(named in title for title in titles), named


# ---- their commands ----------------------------------------------------------------------------------------------


class Trouble(NamedTuple):
    """A sidecar with a failed call, and what stands for the capital words of a runbook."""

    sidecar: Running
    words: dict[str, str]

    def filled(self, command: str) -> str:
        command = command.replace("http://127.0.0.1:4141", url(self.sidecar))
        return re.sub(r"\b[A-Z][A-Z_]+\b", lambda found: self.words.get(found[0], found[0]), command)


async def fails_once(talk: Talk) -> None:
    while True:
        await talk.read_request()
        await talk.send(answer(b"no", "503 Busy") if len(talk.upstream.requests) == 1 else answer())


@pytest.fixture
async def trouble(start_sidecar: Starter, start_upstream: UpstreamStarter, tmp_path: Path) -> Trouble:
    """A call that failed for good and was kept, an upstream that is well again, and the files that commands ask for."""
    upstream = await start_upstream(fails_once)
    payments = {"route": "/pay", "endpoints": [upstream.url], "policy": "once"}
    sidecar = await start_sidecar(upstreams={"payments": payments})
    reply = await (await sidecar.app()).ask(
        "POST /pay/charges HTTP/1.1\r\nHost: s\r\nIdempotency-Key: one\r\nContent-Length: 2\r\n\r\n{}"
    )
    config = tmp_path / "sidecar.yaml"
    config.write_text(json.dumps({"upstreams": {"payments": payments | {"policy": "default"}}}))
    return Trouble(
        sidecar,
        {
            "UPSTREAM": "payments",
            "CODE": "BAD_GATEWAY",
            "HOST": "example.test",
            "SESSION_ID": reply.get("x-sidecar-session") or "",
            "ID": reply.get("x-sidecar-dlq-id") or "",
            "FILE": str(config),
            "BACKUP": str(tmp_path / "backup"),
            "FOLDER": str(tmp_path / "exported"),
        },
    )


def asked(words: list[str]) -> tuple[int, str]:
    """What curl would: the answer's status and text."""
    given = iter(words)
    method, body, headers, address = None, None, {}, ""
    for word in given:
        if word == "-X":
            method = next(given)
        elif word == "-d":
            body = next(given).encode()
        elif word == "-H":
            name, _, value = next(given).partition(":")
            headers[name] = value.strip()
        elif word != "-s":
            address = word
    request = urllib.request.Request(address, body, headers, method=method)
    try:
        with OPENER.open(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def every_command() -> Iterator[object]:
    seen = set()
    for where, text in texts():
        for command in commands(text):
            if command not in seen:
                seen.add(command)
                yield pytest.param(command, id=f"{where}: {command}")


def test_every_runbook_has_commands() -> None:
    assert [] == [page.stem for page in RUNBOOKS if len(commands(page.read_text(encoding="utf-8"))) < 2]


@pytest.mark.parametrize("command", [*every_command()])
async def test_a_command_of_a_runbook_works(trouble: Trouble, command: str) -> None:
    command, _, grep = trouble.filled(command).partition(" | ")
    program, *words = shlex.split(command)
    if program == "sidecar":
        if words[0] in NOT_RUN:
            parser().parse_args(words)
            return
        there = {
            "SIDECAR_ADMIN": url(trouble.sidecar),
            "SIDECAR__STATE_DIR": str(trouble.sidecar.proxy.settings.state_dir),
        }
        if words[:2] == ["dlq", "import"]:
            await here("dlq", "export", words[2], **there)
        ended = await here(*words, **there)
        if "JOB_ID" in words:  # there is none here, and a command that is understood says so
            assert (1, True) == (ended.code, "'JOB_ID'" in ended.err), ended.err
        else:
            assert 0 == ended.code, ended.out + ended.err
    elif "REPLAY_ID" in command:  # likewise; a path that is wrong is answered otherwise
        status, text = await asyncio.to_thread(asked, words)
        assert (404, True) == (status, "'REPLAY_ID'" in json.loads(text)["message"]), text
    else:
        status, text = await asyncio.to_thread(asked, words)
        assert status in (200, 202), text
        if grep:
            pattern = shlex.split(grep)[-1]
            assert re.search(pattern, text), pattern
