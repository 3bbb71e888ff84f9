"""Interception and programs that do not say who they are: each is judged by itself, as HTTP libraries come."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.authority import Authority
from tests.doubles.faults import until
from tests.doubles.upstream import always, answer
from tests.test_intercept import Opened, authority, opened  # noqa: F401  # fixtures

GET = """
import importlib, json, sys
library = importlib.import_module(sys.argv[1])
try:
    reply = library.get("https://api.test/x")
except Exception as error:
    print(json.dumps([type(error).__name__, None]))
else:
    print(json.dumps([reply.status_code, reply.headers.get("x-sidecar-outcome")]))
"""


async def called(its: Opened, script: Path, library: str, trusted: Path) -> list[Any]:
    """The status or the error, and the outcome, that a program of its own got."""
    url = f"http://127.0.0.1:{its.sidecar.address[1]}"
    named = {"HTTPS_PROXY": url, "SSL_CERT_FILE": str(trusted), "REQUESTS_CA_BUNDLE": str(trusted)}
    environ = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | named
    started = await asyncio.create_subprocess_exec(
        sys.executable, str(script), library, stdout=asyncio.subprocess.PIPE, env=environ
    )
    said, _ = await asyncio.wait_for(started.communicate(), 30)
    return list(json.loads(said))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="programs are told apart by /proc")
@pytest.mark.parametrize("library", ["httpx", "requests"])
async def test_a_program_without_our_authority_does_not_take_the_sight_of_one_that_has_it(
    opened: Any,  # noqa: F811
    authority: Authority,  # noqa: F811
    tmp_path: Path,
    library: str,
) -> None:
    script = tmp_path / "app.py"
    script.write_text(GET)
    its = await opened(always(answer(b"secret")))
    error, _ = await called(its, script, library, authority.bundle)
    assert error in ("ConnectError", "SSLError")
    await until(lambda: its.demotions == 1)
    assert [200, "first_try"] == await called(its, script, library, its.ca)
    assert [200, None] == await called(its, script, library, authority.bundle), "it passes as a tunnel"
    assert [200, "first_try"] == await called(its, script, library, its.ca)
    assert 1 == its.demotions
    ((client, *_),) = its.sidecar.proxy.interception.demotions.in_force(0.0)
    assert ("127.0.0.1", "") == (client.address, client.agent)
    assert client.program is not None
    assert client.program.name in its.sidecar.logged.getvalue()
    assert client.program.name.endswith(" app.py")
