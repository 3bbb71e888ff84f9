"""See something happen in ten seconds: a flaky upstream, the sidecar, a small client. Run it with `make demo`.

Everything runs on loopback on free ports and ends by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALLS = 12
NUMBERS = itertools.count(1)


async def flaky(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every third call fails with a 503, every fifth never answers and closes."""
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            count = next(NUMBERS)
            if count % 5 == 0:
                break
            status, text = ("503 Service Unavailable", "busy") if count % 3 == 0 else ("200 OK", "hello")
            body = json.dumps({"call": count, "text": text}).encode()
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()


def start_sidecar(upstream_port: int, folder: str) -> tuple[subprocess.Popen[str], str, str]:
    file = Path(folder) / "demo.yaml"
    file.write_text(
        "listen: {port: 0}\nadmin: {port: 0}\n"
        f"state_dir: {folder}/state\n"
        f'upstreams: {{flaky: {{route: /flaky, endpoints: ["http://127.0.0.1:{upstream_port}"]}}}}\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "sidecar", "run", "-c", str(file)],
        cwd=ROOT,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        found = re.findall(r"127\.0\.0\.1:\d+", json.loads(line)["body"])
        if len(found) == 2:
            return process, found[0], found[1]
    raise SystemExit("the sidecar did not start")


def call(address: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/flaky/hello", timeout=5) as reply:
            return f"{reply.status} {reply.read().decode()}   outcome={reply.headers['x-sidecar-outcome']}"
    except urllib.error.HTTPError as failed:
        body = json.loads(failed.read())
        told = f"{body['error_code']}: {body['message']}" if "error_code" in body else json.dumps(body)
        return f"{failed.code} {told}   outcome={failed.headers['x-sidecar-outcome']}"


def ask(admin: str, path: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{admin}{path}", timeout=5) as reply:
        return str(reply.read().decode())


def metrics(admin: str) -> str:
    lines = ask(admin, "/metrics").splitlines()
    wanted = [line for line in lines if line.startswith(("sidecar_sessions_total", "sidecar_upstream_attempts_total"))]
    return "\n".join("  " + line for line in wanted if not line.endswith((" 0", " 0.0")))


def explanation(admin: str) -> str:
    """The story of the last request that was saved by a retry."""
    kept = json.loads(ask(admin, "/sessions?outcome=recovered&limit=1"))["items"]
    if not kept:
        return "  (every call was answered at once this time)"
    session = json.loads(ask(admin, f"/sessions/{kept[0]['session_id']}"))
    return "\n".join(f"  {step['step']}. {step['what']}" for step in session["explanation"])


async def main() -> None:
    server = await asyncio.start_server(flaky, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        process, address, admin = await asyncio.to_thread(start_sidecar, port, folder)
        try:
            print(f"A flaky upstream on 127.0.0.1:{port}; the sidecar on {address}, its admin port on {admin}.\n")
            for number in range(1, CALLS + 1):
                print(f"  call {number:2}: {await asyncio.to_thread(call, address)}")
            print(f"\nWhat the sidecar saw (http://{admin}/metrics):\n{await asyncio.to_thread(metrics, admin)}")
            print(f"\nWhy it did what it did (http://{admin}/sessions):\n{await asyncio.to_thread(explanation, admin)}")
        finally:
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.communicate)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
