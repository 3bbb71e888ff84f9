"""How many attempts each stage of a workflow has made.

Law: pure, told the time, bounded. Attempts are counted per workflow and stage, over all requests that belong there,
so that a failing stage uses up its own attempts and nobody else's. The count limits retries: the first attempt of a
request is always made. A stage that succeeded begins anew: it is not the one that is failing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from config.policy import DEFAULT_STAGE_ATTEMPTS

_MOST_STAGES = 64
"""Stage names come from requests, so one workflow may not have any number of them."""


class _Workflow:
    __slots__ = ("attempts", "last_used")

    def __init__(self) -> None:
        self.attempts: OrderedDict[str, int] = OrderedDict()
        self.last_used = 0.0


class StageBudgets:
    """`stages` are the limits by name, `ttl` how long an unused workflow is remembered, `capacity` how many are."""

    __slots__ = ("_capacity", "_limits", "_ttl", "_workflows")

    def __init__(self, stages: Mapping[str, int], ttl: float, capacity: int) -> None:
        self.configure(stages, ttl, capacity)
        self._workflows: OrderedDict[str, _Workflow] = OrderedDict()
        """The least recently used first."""

    def configure(self, stages: Mapping[str, int], ttl: float, capacity: int) -> None:
        self._limits = dict(stages)
        self._ttl = ttl
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._workflows)

    def limit(self, stage: str) -> int:
        return self._limits.get(stage, DEFAULT_STAGE_ATTEMPTS)

    def attempt(self, workflow: str, stage: str, now: float) -> None:
        """An attempt begins."""
        self._forget_old(now)
        entry = self._workflows.get(workflow)
        if entry is None:
            entry = self._workflows[workflow] = _Workflow()
            while len(self._workflows) > self._capacity:
                self._workflows.popitem(last=False)
        else:
            self._workflows.move_to_end(workflow)
        entry.last_used = now
        entry.attempts[stage] = entry.attempts.get(stage, 0) + 1
        entry.attempts.move_to_end(stage)
        if len(entry.attempts) > _MOST_STAGES:
            entry.attempts.popitem(last=False)

    def made(self, workflow: str, stage: str, now: float) -> int:
        """How many attempts were made since the stage last succeeded."""
        self._forget_old(now)
        entry = self._workflows.get(workflow)
        return entry.attempts.get(stage, 0) if entry is not None else 0

    def succeeded(self, workflow: str, stage: str) -> None:
        entry = self._workflows.get(workflow)
        if entry is not None:
            entry.attempts.pop(stage, None)

    def _forget_old(self, now: float) -> None:
        while self._workflows:
            workflow, entry = next(iter(self._workflows.items()))
            if now - entry.last_used < self._ttl:
                return
            del self._workflows[workflow]
