"""Unmodified programs under `sidecar run --intercept api.test -- …`: each client's GET is retried and seen.

The upstream is a TLS server here that fails each method once. Nobody resolves `api.test`: the configuration names an
endpoint for it. A client that is not installed is skipped, and says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from sidecar.variables import APPENDS, REPLACES
from tests.conftest import UpstreamStarter
from tests.doubles.authority import Authority, server_side
from tests.doubles.upstream import Talk, answer
from tests.e2e.process import REPOSITORY

PYTHON = {
    "requests": """
import requests
print(requests.get("https://api.test/v1/thing").status_code)
print(requests.post("https://api.test/v1/thing", data=b"hello").status_code)
""",
    "httpx": """
import httpx
print(httpx.get("https://api.test/v1/thing").status_code)
print(httpx.post("https://api.test/v1/thing", content=b"hello").status_code)
""",
    "aiohttp": """
import aiohttp, asyncio
async def main():
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with session.get("https://api.test/v1/thing") as answer:
            print(answer.status)
        async with session.post("https://api.test/v1/thing", data=b"hello") as answer:
            print(answer.status)
asyncio.run(main())
""",
    "urllib.request": """
import urllib.error, urllib.request
print(urllib.request.urlopen("https://api.test/v1/thing").status)
try:
    print(urllib.request.urlopen("https://api.test/v1/thing", data=b"hello").status)
except urllib.error.HTTPError as error:
    print(error.code)
""",
}
# Node before 24 takes no proxy from the environment, so this program, like many, brings an agent that does.
NODE = """
const http = require("http"), https = require("https"), tls = require("tls");
class Agent extends https.Agent {
  createConnection(options, done) {
    const proxy = new URL(process.env.HTTPS_PROXY);
    const target = `${options.host}:${options.port}`;
    http.request({ host: proxy.hostname, port: proxy.port, method: "CONNECT", path: target, headers: { host: target } })
      .on("connect", (answer, socket) => done(null, tls.connect({ ...options, socket, servername: options.host })))
      .on("error", done).end();
  }
}
const agent = new Agent();
const ask = (method, body) => new Promise((resolve, reject) => {
  const asked = https.request({ host: "api.test", port: 443, path: "/v1/thing", method, agent }, (answer) => {
    answer.resume().on("end", () => resolve(answer.statusCode));
  });
  asked.on("error", reject).end(body);
});
(async () => {
  console.log(await ask("GET"));
  console.log(await ask("POST", "hello"));
})();
"""
CURL = """
curl -s -o /dev/null -w '%{http_code}\\n' https://api.test/v1/thing
curl -s -o /dev/null -w '%{http_code}\\n' -d hello https://api.test/v1/thing
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "api authority")


async def fails_first(talk: Talk) -> None:
    while True:
        head, _ = await talk.read_request()
        method = head.split(b" ")[0]
        seen = sum(request.startswith(method) for request in talk.upstream.requests)
        await talk.send(answer(b"busy", "503 Service Unavailable") if seen == 1 else answer(b"fine"))


def command_for(client: str, folder: Path) -> str:
    if client in PYTHON:
        script = folder / "client.py"
        script.write_text(PYTHON[client])
        return f"{sys.executable} {script}"
    program = shutil.which(client)
    if program is None:
        pytest.skip(f"not run: {client} is not installed")
    if client == "curl":
        return CURL
    script = folder / "client.js"
    script.write_text(NODE)
    return f"{program} {script}"


class Ran:
    """A `sidecar run -- …` that has ended."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code = code
        self.lines = out.decode().split()
        self.out = out
        self.err = err.decode()


def environment(**more: str) -> dict[str, str]:
    """Without what the machine that runs the tests has set for itself."""
    dropped = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", *REPLACES, *APPENDS)
    clean = {
        name: value
        for name, value in os.environ.items()
        if name.upper() not in dropped and not name.startswith(("SIDECAR", "OTEL_"))
    }
    return {**clean, "PYTHONPATH": str(REPOSITORY), **more}


async def sidecar_run(folder: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> Ran:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar", "run", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment(**(environ or {})),
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 50)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ran(process.returncode, out, err)


@pytest.mark.parametrize("client", [*PYTHON, "curl", "node"])
async def test_an_unmodified_client_is_retried_and_seen(
    client: str, start_upstream: UpstreamStarter, authority: Authority, tmp_path: Path
) -> None:
    command = command_for(client, tmp_path)
    upstream = await start_upstream(fails_first, tls=server_side(authority.issue("api.test")))
    config = tmp_path / "sidecar.yaml"
    config.write_text(
        json.dumps(
            {
                "upstreams": {
                    "api": {
                        "hosts": ["api.test"],
                        "endpoints": [f"https://127.0.0.1:{upstream.port}"],
                        "ca_bundle": str(authority.bundle),
                    }
                }
            }
        )
    )
    seen = f"{sys.executable} -m sidecar sessions --json > sessions.json"
    ran = await sidecar_run(
        tmp_path, "-c", str(config), "--intercept", "api.test", "--", "sh", "-c", f"{command}\n{seen}"
    )
    assert (0, ["200", "503"]) == (ran.code, ran.lines), ran.err
    assert [b"GET ", b"GET ", b"POST"] == [head[:4] for head in upstream.requests]
    sessions = json.loads((tmp_path / "sessions.json").read_text())["items"]
    told = {(one["method"], one["outcome"], one["total_attempts"]): one["url"] for one in sessions}
    assert {("GET", "recovered", 2), ("POST", "not_retryable", 1)} == set(told)
    assert {"https://api.test/v1/thing"} == set(told.values())
