"""What operators set while the sidecar runs: it lies over the file and the variables, and outlives a restart.

Pure: values in, values out. There are only two kinds of them. A policy set at run time stands for the whole policy of
that name in the file, so that taking it away gives exactly that one back; and `retries_enabled` is the kill switch.
Either may have a time at which it is taken away by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from config.contradiction import KeyPath

POLICIES = "policies"
RETRIES = "retries_enabled"
LONGEST = 30 * 86_400.0
"""Seconds for which one of these may be set at most, where it is to end by itself."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """One state of it; a change makes another."""

    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name, with the keys that were given."""
    retries_enabled: bool | None = None
    """None: as the file says."""
    until: Mapping[str, float] = field(default_factory=dict)
    """Wall time at which one of these ends by itself, by its key (`retries_enabled`, `policies.NAME`); the others do
    not."""

    def __bool__(self) -> bool:
        return bool(self.policies) or self.retries_enabled is not None

    def with_policy(self, name: str, given: Mapping[str, Any], until: float | None = None) -> Runtime:
        policies = {**self.policies, name: dict(given)}
        return replace(self, policies=policies, until=self._until(policy_key(name), until))

    def without_policy(self, name: str) -> Runtime:
        policies = {known: given for known, given in self.policies.items() if known != name}
        return replace(self, policies=policies, until=self._until(policy_key(name), None))

    def with_retries(self, enabled: bool | None, until: float | None = None) -> Runtime:
        until = None if enabled is None else until
        return replace(self, retries_enabled=enabled, until=self._until(RETRIES, until))

    def _until(self, key: str, until: float | None) -> Mapping[str, float]:
        others = {known: at for known, at in self.until.items() if known != key}
        return others if until is None else {**others, key: until}

    def over(self, data: Mapping[Any, Any]) -> dict[Any, Any]:
        """The values with these laid over them; the given ones are not changed."""
        laid = dict(data)
        if self.policies:
            below = laid.get(POLICIES)
            laid[POLICIES] = {**(below if isinstance(below, Mapping) else {}), **self.policies}
        if self.retries_enabled is not None:
            laid[RETRIES] = self.retries_enabled
        return laid

    def sets(self, key: KeyPath) -> bool:
        """Whether the value at this key was given here."""
        if key == (RETRIES,):
            return self.retries_enabled is not None
        return self.replaces(key) and (len(key) == 2 or key[2] in self.policies[str(key[1])])

    def replaces(self, key: KeyPath) -> bool:
        """Whether what the file says at this key does not count."""
        return len(key) >= 2 and key[0] == POLICIES and key[1] in self.policies


def policy_key(name: str) -> str:
    return f"{POLICIES}.{name}"


NOTHING_SET = Runtime()
