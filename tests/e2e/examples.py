"""The examples in README.md, taken from a real run: `python -m tests.e2e.examples` writes them, and the table of metrics,
between their markers. A test makes them anew and compares, so that they stay true.

Shortened: ids to their first eight digits. The free port that the upstream happened to get is written as 8080.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from config.loader import Loaded
from config.model import Settings
from sidecar.assembly import Sidecar
from telemetry.logs import Log
from telemetry.reference import metrics_table
from tests.doubles.app import App
from tests.doubles.faults import field, request
from tests.doubles.otlp import attributes, http_collector
from tests.doubles.upstream import Talk, Upstream, answer
from tests.e2e.conftest import variables
from tests.e2e.signs import ERROR, Tree, get, trees

README = Path(__file__).resolve().parent.parent.parent / "README.md"
_HOST = "api.payments.test"
_WIDTH = 112


async def _upstream(talk: Talk) -> None:
    """The first request for a charge fails, and so does every new charge."""
    while True:
        head, _ = await talk.read_request()
        first = sum(b"GET" in seen[:3] for seen in talk.upstream.requests) == 1
        failing = head.startswith(b"POST") or (first and field(head, b"traceparent") is not None)
        await talk.send(answer(b"{}", "503 Service Unavailable" if failing else "200 OK"))


async def _lookup(host: str, port: int) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]


async def _run() -> dict[str, str]:
    upstream = await Upstream(_upstream).start()
    operations = [
        {"name": "get_charge", "methods": ["GET"], "path": "/v1/charges/{id}"},
        {"name": "create_charge", "methods": ["POST"], "path": "/v1/charges"},
    ]
    with tempfile.TemporaryDirectory() as folder, http_collector() as (url, received):
        keys = {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "state_dir": folder,
            "policies": {"default": {"jitter_type": "none"}},
            "upstreams": {
                "payments": {
                    "route": "/payments",
                    "endpoints": [f"http://{_HOST}:{upstream.port}"],
                    "operations": operations,
                }
            },
        }
        logged = io.StringIO()
        loaded = Loaded(Settings.model_validate(keys), None, {})
        sidecar = Sidecar(loaded, Log(logged), _lookup, variables(url, "http/protobuf"))
        await sidecar.start()
        app = await App.connect(sidecar.address)
        recovered = await app.ask(request("GET", "/payments/v1/charges/ch_7?token=abc"))
        failed = await app.ask(request("POST", "/payments/v1/charges", body=b'{"amount": 5}'))
        explained = await get(
            sidecar.admin_address, f"/sessions/{failed.get('x-sidecar-session')}", "Accept: text/plain"
        )
        while len(received.spans) < 5:
            await asyncio.sleep(0.01)
        app.close()
        await sidecar.stop(grace=0)
        await upstream.stop()
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    session = recovered.get("x-sidecar-session") or ""
    (line,) = [line for line in lines if line.get("sidecar.session.id") == session]
    told = {
        "spans": _tree(trees(received.spans)[session]),
        "line": _wrapped(line),
        "explanation": explained.body.decode(),
    }
    return {name: _shortened(text, upstream.port) for name, text in told.items()}


def _tree(tree: Tree) -> str:
    rows = [("", tree.root), *(("├─ ", span) for span in tree.children[:-1]), ("└─ ", tree.children[-1])]
    shown = []
    for branch, span in rows:
        said = attributes(span)
        kind = "SERVER" if span is tree.root else "CLIENT"
        words = [str(said["http.response.status_code"]), said.get("error.type", "")]
        if span is tree.root:
            words += [f"{said['sidecar.session.outcome']}, {said['sidecar.session.attempts']} attempts"]
        elif "http.request.resend_count" in said:
            words += [f"resend_count {said['http.request.resend_count']}, after {said['sidecar.retry.backoff_s']:g} s"]
        status = "Error" if span.status.code == ERROR else "Unset"
        took = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        shown.append(
            f"{branch + span.name:18} {kind}  {status}  {took:6.1f} ms  {' '.join(word for word in words if word)}"
        )
    return "\n".join(shown) + "\n"


def _wrapped(line: dict[str, Any]) -> str:
    """As JSON, broken only between fields."""
    rows = [""]
    parts = [f"{json.dumps(name)}: {_value(value)}" for name, value in line.items()]
    for number, part in enumerate(parts):
        part = ("{" if not number else "") + part + ("}" if number == len(parts) - 1 else ", ")
        if rows[-1] and len(rows[-1]) + len(part) > _WIDTH:
            rows.append(" ")
        rows[-1] += part
    return "\n".join(row.rstrip() for row in rows) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",\n  ".join(json.dumps(each) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _shortened(text: str, port: int) -> str:
    text = text.replace(str(port), "8080")
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{8,24}\b", r"\1…", text)


def alike(text: str) -> str:
    """Without what differs from run to run: ids, times, and where lines break because of them."""
    text = re.sub(r"\b[0-9a-f]{8}…|\bdlq_\w+", "ID", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "WHEN", text)
    text = re.sub(r"\d{4}-\d\d-\d\d [\d:.]+ to (\d{4}-\d\d-\d\d )?[\d:.]+ UTC", "WHEN", text)
    text = re.sub(r"\+?\d+(\.\d+)?(e-\d+)? (ms|s)\b|(?<=_s\": )[\d.e-]+", "TIME", text)
    return " ".join(text.split())


def sections() -> dict[str, str]:
    """What belongs between which markers."""
    told = uvloop.run(_run())
    fenced = {name: f"```{'json' if name == 'line' else 'text'}\n{text}```\n" for name, text in told.items()}
    return {**fenced, "metrics": metrics_table()}


def between(text: str, name: str) -> str:
    """What README.md has between the markers of this name."""
    return text.partition(f"<!-- {name}: begin -->\n")[2].partition(f"<!-- {name}: end -->")[0]


def main() -> None:
    text = README.read_text()
    for name, section in sections().items():
        before, begin, rest = text.partition(f"<!-- {name}: begin -->\n")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        assert begin and end, f"README.md has no markers for {name}"
        text = before + begin + section + end + after
    README.write_text(text)


if __name__ == "__main__":
    main()
