"""What a soak reads of a sidecar, and whether it is flat."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

MIB = 1024 * 1024
TO_THE_COLLECTOR = 2  # connections that the exporters of spans and logs keep open


@dataclass
class Reading:
    """Of the sidecar's process."""

    at: float
    resident: int
    descriptors: int


class Stores(NamedTuple):
    """How much the sidecar remembers when it is full, and then the first make room for the next."""

    sessions: int = 10_000
    workflows: int = 10_000
    keys: int = 10_000


SHIPPED = Stores()


@dataclass
class Result:
    """What was read, and how the requests came out. `full_at` is when all stores were, infinite if they never were."""

    stores: Stores
    full_at: float = float("inf")
    workflows: int = 0
    keys: int = 0
    readings: list[Reading] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    dropped: int = 0
    idle_before: int = 0
    idle_after: int = 0

    @property
    def kept(self) -> int:
        """Requests that the sidecar remembers."""
        return sum(count for outcome, count in self.outcomes.items() if outcome not in ("first_try", "tunnelled"))

    @property
    def full(self) -> bool:
        held = Stores(self.kept, self.workflows, self.keys)
        return all(have >= most for have, most in zip(held, self.stores, strict=True))

    @property
    def measured(self) -> list[Reading]:
        return [reading for reading in self.readings if reading.at >= self.full_at]

    def per_minute(self, what: str) -> float:
        """How fast it grows with everything full: the slope of the line through what was read."""
        return _slope(self.measured, what) * 60


def _slope(readings: list[Reading], what: str) -> float:
    """Least squares, per second."""
    times = [reading.at for reading in readings]
    values = [float(getattr(reading, what)) for reading in readings]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in times)
    return sum((at - middle) * (value - mean) for at, value in zip(times, values, strict=True)) / spread


def report(result: Result, most_per_minute: float) -> list[str]:
    """What is wrong; nothing when memory and files are flat. `most_per_minute` is of memory, in MiB."""
    if len(result.measured) < 5:
        held = Stores(result.kept, result.workflows, result.keys)
        return [f"the stores did not fill: {held} of {result.stores}"]
    wrong = []
    memory, files = result.per_minute("resident") / MIB, result.per_minute("descriptors")
    if memory > most_per_minute:
        wrong.append(f"memory grows by {memory:.2f} MiB a minute, {most_per_minute:g} may be noise")
    if files * len(result.measured) / 60 > 10:
        wrong.append(f"{files:.2f} more files are open every minute")
    if result.idle_after > result.idle_before + TO_THE_COLLECTOR:
        wrong.append(f"{result.idle_after} connections are left without any load, {result.idle_before} before it")
    if not result.dead_letters:
        wrong.append("no failed request was kept as a dead letter, so nothing is known of those")
    if result.unexpected:
        wrong.append(f"apps met what no upstream caused: {dict(result.unexpected.most_common(3))}")
    return wrong
