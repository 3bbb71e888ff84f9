"""Names that must lead somewhere: policies, error codes, subsystems, operations.

Pure, like `config/checks.py`, whose list it belongs to. The registry of error codes is only read when the
configuration mentions a code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from config.contradiction import Contradiction, KeyPath
from config.errors import NEEDED_FOR_A_NEW_CODE, registry

if TYPE_CHECKING:
    from config.model import Settings

_ANY_CODE = "default"  # beside the error codes of a mapping: whichever code is not named


def reference_problems(settings: Settings) -> Iterator[Contradiction]:
    """Every name that leads nowhere or stands for two things."""
    yield from _unknown_policies(settings)
    yield from _unknown_codes(settings)
    yield from _unfinished_codes(settings)
    yield from _unknown_subsystems(settings)
    yield from _operations_named_twice(settings)


def _unknown_policies(settings: Settings) -> Iterator[Contradiction]:
    known = tuple(settings.policies)
    for path, name in _named_policies(settings):
        if name not in settings.policies:
            message = f"there is no policy of this name under `policies` (there is: {', '.join(known)})"
            yield Contradiction(path, message, (path, ("policies", name)), known)


def _named_policies(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    for code, entry in settings.error_codes.items():
        if entry.policy is not None:
            yield ("error_codes", code, "policy"), entry.policy
    for name, upstream in settings.upstreams.items():
        yield ("upstreams", name, "policy"), upstream.policy
        yield ("upstreams", name, "outbox", "policy"), upstream.outbox.policy
        for code, policy in (upstream.outbox.policies or {}).items():
            yield ("upstreams", name, "outbox", "policies", code), policy
        for index, operation in enumerate(upstream.operations):
            if operation.policy is not None:
                yield ("upstreams", name, "operations", index, "policy"), operation.policy
    for subsystem, operations in settings.subsystem_mappings.items():
        for operation_name, by_code in operations.items():
            for code, policy in by_code.items():
                yield ("subsystem_mappings", subsystem, operation_name, code), policy


def _unknown_codes(settings: Settings) -> Iterator[Contradiction]:
    for path, code, is_key in _named_codes(settings):
        if code in settings.error_codes or code in registry():
            continue
        known = (*registry(), *settings.error_codes, *((_ANY_CODE,) if is_key else ()))
        message = "there is no such error code; `GET /errors` lists all, and `error_codes` can add one"
        looked_at = (path, ("error_codes", code))
        yield Contradiction(path, message, looked_at, known, wrong_name=code if is_key else None)


def _named_codes(settings: Settings) -> Iterator[tuple[KeyPath, str, bool]]:
    """Where a code is named, which, and whether as a key."""
    for place, policy in (
        (("global_defaults",), settings.global_defaults),
        *((("policies", name), policy) for name, policy in settings.policies.items()),
    ):
        if "retryable_errors" in policy.model_fields_set:
            for index, code in enumerate(policy.retryable_errors or ()):
                yield (*place, "retryable_errors", index), code, False
    for index, rule in enumerate(settings.rules):
        yield ("rules", index, "code"), rule.code, False
    for code, entry in settings.error_codes.items():
        for index, other in enumerate(entry.related or ()):
            yield ("error_codes", code, "related", index), other, False
    for name, upstream in settings.upstreams.items():
        for index, rule in enumerate(upstream.rules):
            yield ("upstreams", name, "rules", index, "code"), rule.code, False
        for index, code in enumerate(upstream.dead_letter.codes or ()):
            yield ("upstreams", name, "dead_letter", "codes", index), code, False
        for code in upstream.outbox.policies or ():
            yield ("upstreams", name, "outbox", "policies", code), code, True
    for subsystem, operations in settings.subsystem_mappings.items():
        for operation, by_code in operations.items():
            for code in by_code:
                if code != _ANY_CODE:
                    yield ("subsystem_mappings", subsystem, operation, code), code, True


def _unfinished_codes(settings: Settings) -> Iterator[Contradiction]:
    for code, entry in settings.error_codes.items():
        if code in registry():
            continue
        missing = [key for key in NEEDED_FOR_A_NEW_CODE if getattr(entry, key) is None]
        if missing:
            path = ("error_codes", code)
            message = (
                f"this code is not built in, so it needs {', '.join(missing)} as well; "
                "if a built-in one was meant, correct the name"
            )
            looked_at = (path, *((*path, key) for key in missing))
            yield Contradiction(path, message, looked_at, tuple(registry()), wrong_name=code)


def _unknown_subsystems(settings: Settings) -> Iterator[Contradiction]:
    operations: dict[str, list[str]] = {}
    for name, upstream in settings.upstreams.items():
        known = operations.setdefault(upstream.subsystem or name, [])
        known.extend(operation.name for operation in upstream.operations)
    for subsystem, mapped in settings.subsystem_mappings.items():
        path: KeyPath = ("subsystem_mappings", subsystem)
        if subsystem not in operations:
            yield _unknown_subsystem(settings, path, subsystem, tuple(operations))
            continue
        for operation in mapped:
            if operation not in operations[subsystem]:
                here = (*path, operation)
                there = ", ".join(operations[subsystem]) or "none yet"
                message = f"no upstream of this subsystem has an operation of this name (there is: {there})"
                looked_at = (here, *(("upstreams", name, "operations") for name in settings.upstreams))
                candidates = tuple(operations[subsystem])
                yield Contradiction(here, message, looked_at, candidates, wrong_name=operation)


def _unknown_subsystem(settings: Settings, path: KeyPath, name: str, known: tuple[str, ...]) -> Contradiction:
    looked_at = (path, ("upstreams", name), *(("upstreams", other, "subsystem") for other in settings.upstreams))
    upstream = settings.upstreams.get(name)
    if upstream is not None:
        message = f"the upstream of this name belongs to the subsystem `{upstream.subsystem}`; write that instead"
        return Contradiction(path, message, looked_at)
    message = (
        f"no upstream has this name or this `subsystem` (there is: {', '.join(known) or 'none yet'}); "
        "give the upstream it is about a `subsystem` of this name"
    )
    return Contradiction(path, message, looked_at, known, wrong_name=name)


def _operations_named_twice(settings: Settings) -> Iterator[Contradiction]:
    for name, upstream in settings.upstreams.items():
        seen: set[str] = set()
        for index, operation in enumerate(upstream.operations):
            if operation.name in seen:
                path = ("upstreams", name, "operations", index, "name")
                message = "another operation of this upstream already has this name; each name is given once"
                yield Contradiction(path, message, (path,))
            seen.add(operation.name)
