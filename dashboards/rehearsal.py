"""The incident played through: a real sidecar process, an upstream with moods, an app, and a real Prometheus.

Law: everything on loopback and free ports; ends by itself and leaves nothing running. The rules are the shipped ones,
made faster, so that what takes minutes in life takes seconds here.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dashboards.incident import App, Upstream
from tests.doubles.prometheus import OPENER, Prometheus, free_port, until

FOLDER = Path(__file__).resolve().parent
FASTER = 30
RATE = 50.0
# What $__rate_interval is for a scrape interval of one second: four times that.
RATE_INTERVAL = "4s"
LONGEST_BREAK = 2.5
"""Seconds between two scrapes from which on a rehearsal is not worth judging."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def hurried(rules: str) -> str:
    """The rules with every duration divided by FASTER: windows, waits, the age of a dead letter."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _UNITS[found[3]]
        return f"{found[1]}{max(1, round(seconds / FASTER))}s"

    faster = re.sub(r"(\[|\bfor: |\binterval: )(\d+)([smhd])\b", shorter, rules)
    return faster.replace("> 3600", f"> {3600 // FASTER // 20}")


@dataclass
class Played:
    """What a rehearsal leaves to look at. Times are wall times, as Prometheus counts."""

    prometheus: Prometheus
    admin: str
    listen: tuple[str, int]
    app: App
    upstream: Upstream
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    alerts: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    """When an alert was seen, its name and all of it; asked every half second."""
    dry_run: dict[str, Any] = field(default_factory=dict)
    replayed: dict[str, Any] = field(default_factory=dict)
    discarded: int = 0
    """What the operator was told before the replay, how it ended, and how many dead letters were given up."""

    def mishaps(self) -> None:
        """A tunnel, a request for nobody and one that nobody can read. A counter needs two to show a rate."""
        host, port = self.listen
        for first in (f"CONNECT 127.0.0.1:{self.upstream.port} HTTP/1.1", "GET /nowhere HTTP/1.1", "GET / HTTP/9.9"):
            with socket.create_connection((host, port), 5) as raw:
                raw.sendall(f"{first}\r\nHost: nobody.test\r\n\r\n".encode())
                raw.recv(4096)

    @property
    def began(self) -> float:
        return min(start for start, _ in self.phases.values())

    @property
    def ended(self) -> float:
        return max(end for _, end in self.phases.values())

    def play(self, phase: str, seconds: float) -> None:
        """The upstream is in this phase for so long, and alerts are watched meanwhile."""
        began = time.time()  # noqa: TID251 - Prometheus' clock is the wall's
        self.upstream.enter(phase)
        if phase != "down":
            self.mishaps()
        if phase == "healthy":
            self.ask("POST", "/reload", {"reason": "to see it on the dashboards"})
        if phase == "replay":
            self.drain()
        self.watch(seconds)
        self.phases[phase] = (began, time.time())  # noqa: TID251 - … here too

    def drain(self) -> None:
        """What an operator does when the upstream is well again: look, send what is safe, give up the rest. Over when
        Prometheus knows that nothing waits any more."""
        self.watch_until('sum(sidecar_breaker_state{state="closed"}) == count(sidecar_breaker_state{state="closed"})')
        safe = {"filter": {"status": "pending"}, "rate": 50}
        self.dry_run = self.ask("POST", "/dlq/replay", {**safe, "dry_run": True})["dry_run"]
        job = self.ask("POST", "/dlq/replay", safe)["replay"]["job_id"]
        deadline = time.monotonic() + 60
        while self.replayed.get("state") != "done":
            self.watch(0.5)
            self.replayed = self.ask("GET", f"/dlq/replays/{job}")
            if self.replayed["state"] == "paused":  # one of them met a breaker that had not closed yet
                self.ask("POST", f"/dlq/replays/{job}/resume", {})
            if time.monotonic() > deadline:
                raise RuntimeError(f"the replay does not end: {self.replayed}")
        while page := self.ask("GET", "/dlq?status=pending&limit=100")["items"]:
            for entry in page:
                self.ask("DELETE", f"/dlq/{entry['dlq_id']}?reason=nobody%20knows%20whether%20it%20was%20executed")
                self.discarded += 1
        self.watch_until("sum(sidecar_dlq_entries) == 0")

    def watch_until(self, expr: str) -> None:
        """Until the expression has a result."""
        deadline = time.monotonic() + 60
        while not self.prometheus.now(expr):
            self.watch(0.5)
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited 60 s for {expr}")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the admin port answers; a refusal is an error that tells its reason."""
        data, headers = (
            (None, {}) if body is None else (json.dumps(body).encode(), {"content-type": "application/json"})
        )
        request = urllib.request.Request(self.admin + path, data, headers, method=method)
        try:
            with OPENER.open(request, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refused:
            raise RuntimeError(f"{method} {path}: {refused.code} {refused.read().decode()}") from None

    def watch(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for alert in self.prometheus.alerts():
                if alert["state"] == "firing":
                    self.alerts.append((time.time(), alert["labels"]["alertname"], alert))  # noqa: TID251 - … and here
            time.sleep(min(0.5, left))

    def stood_still(self) -> float:
        """The longest time without a scrape, in seconds. Prometheus misses none unless the machine stops for a while,
        and then neither panels nor alerts tell anything about the sidecar."""
        [scraped] = self.prometheus.over('timestamp(up{job="sidecar"})', self.began, self.ended, 1)
        times = sorted(set(scraped.values))
        return max(after - before for before, after in itertools.pairwise(times))

    def fired(self) -> set[str]:
        return {name for _, name, _ in self.alerts}

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.prometheus.alerts() if alert["state"] == "firing"}


def settings(folder: Path, upstream: Upstream, listen: int, admin: int) -> dict[str, Any]:
    """A configuration in which a breaker's life fits into seconds."""
    return {
        "listen": {"port": listen},
        "admin": {"port": admin},
        "state_dir": str(folder / "state"),
        "policies": {
            "brisk": {"max_attempts": 3, "base_delay": 0.05, "max_delay": 0.2, "attempt_timeout": 1, "total_timeout": 3}
        },
        "upstreams": {
            "payments": {
                "route": "/payments",
                "endpoints": [f"http://127.0.0.1:{upstream.port}"],
                "policy": "brisk",
                "timeouts": {"connect": 0.5},
                "breaker": {"open_for": 2, "open_for_max": 3, "window": 5, "min_volume": 20},
            },
            "legacy": {"hosts": ["legacy.test"], "tls": "originate", "insecure_skip_verify": True},
        },
    }


@contextmanager
def rehearsal(folder: Path) -> Iterator[Played]:
    """Everything running and healthy; call `play` on what is yielded."""
    upstream = Upstream()
    upstream.enter("healthy")
    listen, admin = free_port(), free_port()
    (folder / "sidecar.json").write_text(json.dumps(settings(folder, upstream, listen, admin)))  # JSON is YAML
    pages = folder / "pages"
    pages.mkdir()
    (pages / "runbooks").symlink_to(FOLDER / "runbooks")
    (folder / "rules.yml").write_text(hurried((FOLDER / "rules.yml").read_text(encoding="utf-8")))
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    threading.Thread(target=collector.serve_forever, args=(0.05,), daemon=True).start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SIDECAR", "OTEL_"))} | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
    }
    with (folder / "sidecar.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar", "run", "-c", str(folder / "sidecar.json")],
            cwd=FOLDER.parent,
            env=environment,
            stderr=log,
        )
    base = f"http://127.0.0.1:{admin}"
    prometheus = None
    app = App(f"http://127.0.0.1:{listen}/payments/", RATE)
    try:
        until(lambda: process.poll() is not None or _answers(f"{base}/readyz"), 20, "the sidecar to be ready")
        if process.poll() is not None:
            raise RuntimeError(f"the sidecar did not start:\n{(folder / 'sidecar.log').read_text()}")
        prometheus = Prometheus(
            folder / "prometheus",
            targets={"sidecar": [f"127.0.0.1:{admin}"]},
            rules=folder / "rules.yml",
            pages=pages,
        )
        until(lambda: prometheus.targets_up() == 1, 10, "Prometheus to scrape the sidecar")
        app.start()
        yield Played(prometheus, base, ("127.0.0.1", listen), app, upstream)
    finally:
        app.stop()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if prometheus is not None:
            prometheus.stop()
        upstream.stop()
        collector.shutdown()
        collector.server_close()


class _Collector(BaseHTTPRequestHandler):
    """Takes every batch, so that traces are kept and exemplars point at them."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silent."""


def _answers(url: str) -> bool:
    try:
        with OPENER.open(url, timeout=1) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False
