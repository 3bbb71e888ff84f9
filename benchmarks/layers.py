"""What each layer costs a healthy request, in microseconds of CPU: the proxy's own code, without sockets.

    python -m benchmarks.layers [--export-to http://127.0.0.1:4318]

A layer is switched off by putting a function that does nothing in its place; its cost is the difference. The setups
take turns, each figure is the best of its rounds: what disturbs a round can only make it slower.

A switch that a healthy request does not use any more would show a cost of nothing, so each is tried out first.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.line import Line, NotOnThePath
from benchmarks.peers import export_environment
from telemetry.record import Attempt, Session

AIM_MICROSECONDS = 6
WARM_UP_SHARE = 5  # one in so many requests of a round, before the first


# ---- layers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Switch:
    """One call that a healthy request makes, and what it may be replaced with."""

    owner: Any
    name: str
    instead: Callable[..., Any]

    def off(self) -> None:
        setattr(self.owner, self.name, self.instead)

    def uses(self, push: Callable[[], None]) -> int:
        """How often it is called meanwhile."""
        real, calls = getattr(self.owner, self.name), 0

        def counting(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return real(*arguments)

        setattr(self.owner, self.name, counting)
        push()
        setattr(self.owner, self.name, real)
        return calls


def nothing(*_: object) -> None:
    """The layer that is not there."""


def _budget(line: Line) -> list[Switch]:
    return [Switch(line.destination.upstream.budget, "request", nothing)]


def _breaker(line: Line) -> list[Switch]:
    (choice,) = line.destination.choices
    permit = choice.admit(0.0)
    return [Switch(choice, "admit", lambda now: permit), Switch(choice, "record", nothing)]


def _metrics(line: Line) -> list[Switch]:
    return [Switch(line.proxy.signals.metrics, "observe", nothing)]


def _aggregates(line: Line) -> list[Switch]:
    return [Switch(line.proxy.signals.aggregates, "observe", nothing)]


def _telemetry(line: Line) -> list[Switch]:
    return [Switch(line.proxy.signals, "observe", nothing), Switch(line.proxy.signals, "begin", nothing)]


def _everything(line: Line) -> list[Switch]:
    return _budget(line) + _breaker(line) + _telemetry(line)


LAYERS: Mapping[str, Callable[[Line], list[Switch]]] = {
    "retry budget": _budget,
    "breaker": _breaker,
    "metrics": _metrics,
    "aggregates": _aggregates,
    "telemetry, nothing exported": _telemetry,
}


def switch_off(line: Line, layer: str, switches: Sequence[Switch]) -> None:
    for switch in switches:
        if switch.uses(lambda: line.push(3)) < 3:
            raise NotOnThePath(f"{layer}: {switch.name} is not called by a healthy request any more")
    for switch in switches:
        switch.off()


# ---- measuring ---------------------------------------------------------------------------------------------------


async def measure(rounds: int, requests: int, export_to: str | None = None) -> dict[str, float]:
    """Microseconds per request by layer; with export only when there is somewhere to export to."""
    with tempfile.TemporaryDirectory(prefix="sidecar-layers-") as folder:
        lines = {"whole": Line(Path(folder))}
        without = {layer: Line(Path(folder)) for layer in (*LAYERS, "everything")}
        lines |= without
        for percent in (1, 100) if export_to is not None else ():
            environ = export_environment(str(export_to), percent / 100) | {
                "OTEL_EXPORTER_OTLP_TIMEOUT": "1000",
                "OTEL_BSP_SCHEDULE_DELAY": "250",  # a round waits for its last spans
                "OTEL_BSP_MAX_QUEUE_SIZE": str(max(8192, 2 * requests)),  # nobody rests here between two requests
            }
            lines[f"{percent} %"] = Line(Path(folder), environ)
        for line in lines.values():
            await line.connect()
        for layer, line in without.items():
            switches = _everything(line) if layer == "everything" else LAYERS[layer](line)
            switch_off(line, layer, switches)
        try:
            best = _best_rounds(lines, rounds, requests)
            record = min(_record_microseconds(requests) for _ in range(rounds))
        finally:
            for line in lines.values():
                line.close()
    return _costs(best, record)


def _best_rounds(lines: Mapping[str, Line], rounds: int, requests: int) -> dict[str, float]:
    for line in lines.values():
        line.microseconds(max(1, requests // WARM_UP_SHARE))
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # as the proxy runs
    best = dict.fromkeys(lines, float("inf"))
    for _ in range(rounds):
        for name, line in lines.items():
            best[name] = min(best[name], line.microseconds(requests))
    return best


def _record_microseconds(count: int) -> float:
    """The record cannot be left out, so it is made by itself."""
    began = time.process_time()
    for _ in range(count):
        session = Session(b"0123456789abcdef00000000", "GET", "/bench/json", 0.0)
        session.attempts.append(Attempt("first", "127.0.0.1:9", 0.0))
    with_record = time.process_time() - began
    began = time.process_time()
    for _ in range(count):
        pass
    return (with_record - (time.process_time() - began)) / count * 1e6


def _costs(best: Mapping[str, float], record: float) -> dict[str, float]:
    whole, silent = best["whole"], best["telemetry, nothing exported"]
    costs = {"whole request, in process": whole, "record (by itself)": record}
    costs |= {layer: whole - best[layer] for layer in LAYERS}
    for percent in (1, 100):
        if f"{percent} %" in best:
            aim = f" (aim ≤ {AIM_MICROSECONDS})" if percent == 1 else ""
            costs[f"telemetry, {percent} % traced{aim}"] = best[f"{percent} %"] - silent
    costs["all the rest (parse, route, relay, …)"] = best["everything"]
    return {name: round(cost, 2) for name, cost in costs.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description="CPU time of a request by layer.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=10_000, help="per round")
    parser.add_argument("--export-to", metavar="URL", help="an OTLP/HTTP receiver; without one nothing is exported")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    try:
        costs = uvloop.run(measure(options.rounds, options.requests, options.export_to))
    except NotOnThePath as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(costs))
    else:
        print("\n".join(f"{name:<48} {cost:>7.2f} µs" for name, cost in costs.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
