"""An upstream that goes through an incident, and an app that keeps calling: for compose.yaml, the tests, the preview.

Law: standard library only and no part of the product, so that it runs in a bare Python image. What fails is counted
and not rolled: of ten calls in the phase `errors` exactly three fail, so tests know what to expect.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NoReturn
from urllib.parse import urlsplit

PHASES = ("healthy", "errors", "down", "recovering", "replay")
# Of ten calls, these fail.
FAILING = {"healthy": (), "errors": (1, 4, 7), "down": tuple(range(10)), "recovering": (5,), "replay": ()}
LATENCY = {"healthy": 0.004, "errors": 0.012, "down": 0.0, "recovering": 0.03, "replay": 0.004}


class Upstream:
    """Listens while it is not down. `enter` changes its mood; a phase that is down refuses connections."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = port
        self.phase = "down"
        self.answered: Counter[tuple[str, int]] = Counter()
        self.numbers = itertools.count()
        self._server: _Server | None = None

    def enter(self, phase: str) -> None:
        self.phase = phase
        if phase == "down":
            self.stop()
        elif self._server is None:
            self._server = _Server((self.host, self.port), self)
            self.port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            server.cut()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], upstream: Upstream) -> None:
        self.upstream = upstream
        self._open: set[socket.socket] = set()
        super().__init__(address, _Conversation)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        self._open.add(request)
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # type: ignore[override]
        """A connection cut in the middle is what an incident looks like, and no reason to print anything."""

    def cut(self) -> None:
        """Kept-alive connections go too: a machine that is gone does not answer on them either."""
        for request in tuple(self._open):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class _Conversation(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one segment
    server: _Server

    def _answer(self) -> None:
        upstream = self.server.upstream
        self.rfile.read(int(self.headers.get("content-length", 0)))
        phase = upstream.phase
        if phase == "down":
            self.close_connection = True
            return
        time.sleep(LATENCY[phase])
        status = 503 if next(upstream.numbers) % 10 in FAILING[phase] else 200
        upstream.answered[phase, status] += 1
        body = b'{"status": "%d"}' % status
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - the names that http.server looks for

    def log_message(self, *_: object) -> None:
        """Silent: the sidecar is the one to be watched."""


class App:
    """Calls `url` so many times a second, whatever comes back: seven GETs, two POSTs with a key and one without. One
    key in twenty is used twice, as by an app that did not hear the answer; one call in a hundred goes to the
    outbox."""

    def __init__(self, url: str, rate: float, workers: int = 24) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._path = parts.path
        self._rate = rate
        self._workers = workers
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.seen: Counter[str] = Counter()
        """Answers by outcome, as the sidecar told them."""
        self.kept: set[str] = set()
        """The dead letters that answers named."""

    def start(self) -> App:
        began = time.monotonic()
        for _ in range(self._workers):
            thread = threading.Thread(target=self._work, args=(began,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(10)

    def _work(self, began: float) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=10)
        for number in self._numbers:
            if self._stopped.wait(max(0.0, began + number / self._rate - time.monotonic())):
                break
            self.seen[self._call(connection, number)] += 1
        connection.close()

    def _call(self, connection: http.client.HTTPConnection, number: int) -> str:
        method, headers, body = "GET", {}, None
        # Another order in each ten, or the calls that fail would be the same kind of call again and again.
        kind = (3 * number + number // 10) % 10
        if kind >= 7:
            headers = {"content-type": "application/json"}
            if kind == 8 and number % 10 == 0:
                number -= 10  # the same call as ten before, which was one with a key
            handed_over = kind == 9 and number // 10 % 10 == 0
            if handed_over:
                headers["prefer"] = "respond-async"
            if kind != 9 or handed_over:
                headers["idempotency-key"] = f"call-{number}-{id(self)}"
            method, body = "POST", b'{"number": %d}' % number
        try:
            connection.request(method, f"{self._path}{number % 10}", body, headers)
            with connection.getresponse() as response:
                response.read()
                if kept := response.getheader("x-sidecar-dlq-id"):
                    self.kept.add(kept)
                return response.getheader("x-sidecar-outcome") or "none"
        except (OSError, http.client.HTTPException):
            connection.close()
            return "unreachable"


def _for_ever(port: int, seconds: float) -> NoReturn:
    upstream = Upstream(port, "0.0.0.0")
    while True:
        for phase in PHASES[:-1]:  # nobody replays here; compose/sidecar.yaml lets it happen by itself
            print(f"{phase} for {seconds:g} s", flush=True)
            upstream.enter(phase)
            time.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="An upstream with moods, or an app that keeps calling.")
    commands = parser.add_subparsers(dest="command", required=True)
    upstream = commands.add_parser("upstream")
    upstream.add_argument("--port", type=int, default=8080)
    upstream.add_argument("--phase-seconds", type=float, default=120)
    app = commands.add_parser("app")
    app.add_argument("--url", required=True)
    app.add_argument("--rate", type=float, default=20)
    chosen = parser.parse_args()
    if chosen.command == "upstream":
        _for_ever(chosen.port, chosen.phase_seconds)
    calling = App(chosen.url, chosen.rate).start()
    while True:
        time.sleep(30)
        print(dict(calling.seen), flush=True)


if __name__ == "__main__":
    main()
