"""Which policy a request follows, before its first failure and after each.

Law: pure, and worked out when the sidecar starts: a request costs a dictionary look-up. The order is

    the request's `x-sidecar-policy`
    subsystem_mappings.<subsystem>.<operation>.<code>, then its `default`
    the operation's `policy`
    the upstream's `policy`, when somebody set one
    the error code's own
    `default`

Before the first failure there is no code; the policy chosen then gives the timeouts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from config.errors import ErrorCode
from config.model import Settings
from config.operations import Operation, path_regex
from config.policy import DEFAULT_POLICY, Policy
from config.upstream import Upstream

_ANY_CODE = "default"


class Chosen(NamedTuple):
    """A policy and the name it stands under."""

    id: str
    policy: Policy


class PolicyChoice:
    """The policies of one upstream's requests."""

    __slots__ = ("_after", "_before", "_default", "_named", "operations")

    def __init__(self, settings: Settings, name: str, upstream: Upstream, registry: Mapping[str, ErrorCode]) -> None:
        self._named = {policy_id: Chosen(policy_id, policy) for policy_id, policy in settings.policies.items()}
        self._default = self._named[DEFAULT_POLICY]
        self.operations = Operations(upstream.operations)
        mappings = settings.subsystem_mappings.get(upstream.subsystem or name, {})
        self._before: dict[str | None, Chosen] = {}
        self._after: dict[tuple[str | None, str], Chosen] = {}
        for operation in (None, *upstream.operations):
            key = operation.name if operation is not None else None
            mapped = mappings.get(operation.name, {}) if operation is not None else {}
            said = mapped.get(_ANY_CODE) or (operation and operation.policy) or upstream.chosen_policy
            self._before[key] = self._named[said or DEFAULT_POLICY]
            for code, entry in registry.items():
                self._after[key, code] = self._named[mapped.get(code) or said or entry.policy or DEFAULT_POLICY]

    def before(self, operation: str | None, asked_for: str | None = None) -> Chosen:
        """Before anything failed. `asked_for` is the request's own wish, a name that exists."""
        return self._named[asked_for] if asked_for is not None else self._before.get(operation, self._default)

    def after(self, operation: str | None, code: str, asked_for: str | None = None) -> Chosen:
        """After a failure with this code."""
        if asked_for is not None:
            return self._named[asked_for]
        return self._after.get((operation, code)) or self.before(operation)


class Operations:
    """The operations of one upstream, ready to be matched: one regular expression per method."""

    __slots__ = ("_any_method", "_by_method", "_named")

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._named = {operation.name: operation for operation in operations}
        methods = {method for operation in operations for method in operation.methods}
        self._any_method = _Patterns([operation for operation in operations if not operation.methods])
        self._by_method = {
            method: _Patterns([one for one in operations if not one.methods or method in one.methods])
            for method in methods
        }

    def __bool__(self) -> bool:
        return bool(self._named)

    def named(self, name: str) -> Operation | None:
        return self._named.get(name)

    def names(self) -> tuple[str, ...]:
        return tuple(self._named)

    def match(self, method: str, target: bytes) -> Operation | None:
        """The first operation that matches; `target` is what the upstream is asked for, its query is ignored."""
        if not self._named:
            return None
        return self._by_method.get(method, self._any_method).match(target.partition(b"?")[0])


class _Patterns:
    """Alternatives in their order, each ending in an empty group, whose number says which one it was."""

    __slots__ = ("_operations", "_regex")

    def __init__(self, operations: list[Operation]) -> None:
        self._operations = operations
        pieces = [b"(?:" + path_regex(one.path).pattern.encode() + b")()" for one in operations]
        self._regex = re.compile(b"|".join(pieces), re.DOTALL) if pieces else None

    def match(self, path: bytes) -> Operation | None:
        found = self._regex.fullmatch(path) if self._regex is not None else None
        if found is None or found.lastindex is None:
            return None
        return self._operations[found.lastindex - 1]
