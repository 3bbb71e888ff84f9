"""An upstream with weak nerves, for the first walk in the README: `python config/examples/walk.py 9000`.

GET /flaky is refused with a 503 every other time. POST /charges is refused with a 503 until somebody calls /repair.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count


class Upstream(BaseHTTPRequestHandler):
    """One connection of a caller."""

    protocol_version = "HTTP/1.1"
    calls = count(1)
    repaired = False

    def do_GET(self) -> None:
        self.answer(503 if self.path == "/flaky" and next(self.calls) % 2 else 200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/repair":
            type(self).repaired = True
        self.answer(200 if self.repaired else 503)

    def answer(self, status: int) -> None:
        body = json.dumps({"status": status}).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Says nothing: the walk is about what the sidecar says."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Upstream).serve_forever()
