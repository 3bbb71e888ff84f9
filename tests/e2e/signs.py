"""What a running sidecar shows, read from outside: a scrape, spans as trees, log lines, events, error records.

Nothing here knows what to expect; it only reads, so that a test can lay one signal beside another.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.doubles.app import App, Reply
from tests.doubles.otlp import Received, attributes

SERVER, CLIENT = 2, 3
UNSET, ERROR = 0, 2


class Scrape:
    """One answer of `GET /metrics`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum over every series of this name that has these labels."""
        wanted = labels.items()
        return sum(each.value for each in self.samples if each.name == name and wanted <= each.labels.items())

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The same, one sum for each value of a label; what is 0 is left out."""
        found: Counter[str] = Counter()
        for each in self.samples:
            if each.name == name and labels.items() <= each.labels.items():
                found[each.labels[label]] += each.value  # type: ignore[assignment]  # a Counter adds floats as well
        return {word: count for word, count in found.items() if count}

    def series(self, prefix: str = "sidecar_") -> int:
        return sum(each.name.startswith(prefix) for each in self.samples)

    def values(self, label: str) -> set[str]:
        """Every value a label has anywhere."""
        return {each.labels[label] for each in self.samples if label in each.labels}


async def get(address: tuple[str, int], path: str, *fields: str) -> Reply:
    """From the admin port."""
    app = await App.connect(address)
    lines = "".join(f"{line}\r\n" for line in fields)
    try:
        return await app.ask(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}Connection: close\r\n\r\n")
    finally:
        app.close()


async def scrape(address: tuple[str, int]) -> Scrape:
    reply = await get(address, "/metrics")
    assert 200 == reply.status
    return Scrape(reply.body.decode())


@dataclass
class Tree:
    """The spans of one session: its root and what hangs below, in order of time."""

    root: Any
    children: list[Any] = field(default_factory=list)

    @property
    def shown(self) -> dict[str, Any]:
        return attributes(self.root)

    @property
    def session_id(self) -> str:
        return str(self.shown["sidecar.session.id"])


def trees(spans: Iterable[Any]) -> dict[str, Tree]:
    """By session id. Every span is either a root of ours or hangs below one."""
    spans = list(spans)
    roots = {span.span_id: Tree(span) for span in spans if "sidecar.session.id" in attributes(span)}
    for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
        if span.span_id not in roots:
            parent = roots[span.parent_span_id]
            assert parent.root.trace_id == span.trace_id
            parent.children.append(span)
    return {tree.session_id: tree for tree in roots.values()}


def parent_of(head: bytes) -> tuple[str, str, str]:
    """(trace id, span id, flags) of the one `traceparent` that an upstream got."""
    found = [line for line in head.split(b"\r\n")[1:] if line.lower().startswith(b"traceparent:")]
    assert 1 == len(found), head
    version, trace_id, span_id, flags = found[0].partition(b":")[2].strip().decode().split("-")
    assert "00" == version
    return trace_id, span_id, flags


def error_records(state_dir: Path) -> list[dict[str, Any]]:
    """Of every severity, in the order of their attempts."""
    files = sorted((state_dir / "logs").rglob("errors.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
    return sorted(records, key=lambda record: (record["context"]["request_id"], record["retry_count"]))


async def arrived(received: Received, true: Callable[[], bool], what: str = "it") -> None:
    """Wait, with the loop running, until the collector has what is expected."""
    for _ in range(1500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the collector did not get {what}: {len(received.spans)} spans")
