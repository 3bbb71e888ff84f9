"""What is in force: the effective configuration, and its policies with who uses them.

Law: secrets are masked by the models that hold them. What is in force changes in `sidecar/reloading.py` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from config.model import SHIPPED, Settings
from config.policy import Policy
from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Body, NoBody, NoQuery, Text
from sidecar.admin.problem import FieldError, Problem, unknown
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy
from sidecar.reloading import NotApplied, Reloading


class Configuration(Answer):
    """Every setting, with where it came from."""

    file: str | None
    """The configuration file; null when there is none."""
    settings: Mapping[str, Any]
    """As in the file, complete; `sidecar schema` describes it."""
    origins: Mapping[str, str]
    """By dotted key: default, file, environment or runtime."""
    needs_restart: tuple[str, ...]
    """Keys that are another in the file than in force, because they are read only at the start."""


class ChangeShown(Answer):
    """One key that is another now."""

    key: str
    before: Any
    after: Any


class ReloadShown(Answer):
    """What a reload did."""

    file: str | None
    changed: tuple[ChangeShown, ...]
    needs_restart: tuple[str, ...]
    """Keys that are another in the file than in force; a restart puts them in force."""


class ReloadOrder(Body):
    """May be left out."""

    reason: Text = ""
    """For the log and the audit."""


class PolicyShown(Answer):
    """One policy, complete."""

    id: str
    shipped: bool
    """It exists without any configuration."""
    changed: tuple[str, ...]
    """The keys that the configuration itself gives; the others are shipped, or from `global_defaults`."""
    used_by: tuple[str, ...]
    """Where it is named. The policies of error codes follow on those codes wherever nothing else is said."""
    policy: Policy


class Policies(Answer):
    """All of them."""

    items: tuple[PolicyShown, ...]
    next_cursor: None = None


class EffectiveSettings:
    """The handlers."""

    def __init__(self, proxy: Proxy, reloading: Reloading, changes: Changes) -> None:
        self._proxy = proxy
        self._reloading = reloading
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/config", "The configuration in force.", self.config, Configuration)
        yield Route(
            "POST",
            "/reload",
            "Read the configuration file again and put it in force.",
            self.reload,
            ReloadShown,
            body=ReloadOrder,
            refusals=(409, 413, 415),
        )
        yield Route("GET", "/policies", "Every retry policy, with who uses it.", self.policies, Policies)
        yield Route(
            "GET",
            "/policies/{id}",
            "One retry policy.",
            self.policy,
            PolicyShown,
            parts={"id": "The name of a policy."},
            refusals=(404,),
        )

    async def config(self, call: Call[NoQuery, NoBody]) -> Told:
        loaded = self._reloading.loaded
        return {
            "file": None if loaded.path is None else str(loaded.path),
            "settings": loaded.settings.model_dump(mode="json"),
            "origins": loaded.origins,
            "needs_restart": self._reloading.needs_restart,
        }

    async def reload(self, call: Call[NoQuery, ReloadOrder]) -> Told:
        path = self._reloading.loaded.path
        try:
            done = await self._reloading.reload("POST /reload")
        except NotApplied as refused:
            raise not_applied(refused) from None
        await self._changes.note(
            call.request,
            "reloaded",
            about="the configuration",
            before={change.key: change.before for change in done.changed},
            after={change.key: change.after for change in done.changed},
            reason=call.body.reason,
        )
        return ReloadShown(
            file=None if path is None else str(path),
            changed=tuple(ChangeShown(key=one.key, before=one.before, after=one.after) for one in done.changed),
            needs_restart=done.needs_restart,
        )

    async def policies(self, call: Call[NoQuery, NoBody]) -> Told:
        users = self._users()
        policies = self._proxy.settings.policies
        return Policies(items=tuple(_shown(name, policy, users) for name, policy in policies.items()))

    async def policy(self, call: Call[NoQuery, NoBody]) -> Told:
        name = call.named("id")
        policy = self._proxy.settings.policies.get(name)
        if policy is None:
            raise unknown(
                "id", name, self._proxy.settings.policies, f"no policy is called {name[:60]!r}", "GET /policies"
            )
        return _shown(name, policy, self._users())

    def _users(self) -> Mapping[str, tuple[str, ...]]:
        places: dict[str, list[str]] = {}
        for policy, place in _places(self._proxy.settings):
            places.setdefault(policy, []).append(place)
        for entry in self._proxy.registry.values():
            if entry.policy is not None:
                places.setdefault(entry.policy, []).append(f"error code {entry.code}")
        return {policy: tuple(named) for policy, named in places.items()}


def not_applied(refused: NotApplied) -> Problem:
    """409 with every problem; what was in force still is."""
    errors = [
        FieldError(
            field=problem.key or problem.file or problem.variable or "the configuration",
            value=problem.value,
            constraint="configuration",
            message=str(problem),
        )
        for problem in refused.problems
    ]
    return Problem(409, "CONFLICT", f"nothing has changed: {refused}", errors)


def _shown(name: str, policy: Policy, users: Mapping[str, tuple[str, ...]]) -> PolicyShown:
    return PolicyShown(
        id=name,
        shipped=name in SHIPPED,
        changed=tuple(sorted(policy.model_fields_set)),
        used_by=users.get(name, ()),
        policy=policy,
    )


def _places(settings: Settings) -> Iterator[tuple[str, str]]:
    """Every key that names a policy, as (policy, dotted key)."""
    for name, upstream in settings.upstreams.items():
        if upstream.chosen_policy is not None:
            yield upstream.chosen_policy, f"upstreams.{name}.policy"
        for operation in upstream.operations:
            if operation.policy is not None:
                yield operation.policy, f"upstreams.{name}.operations.{operation.name}.policy"
    for subsystem, operations in settings.subsystem_mappings.items():
        for operation_name, codes in operations.items():
            for code, policy in codes.items():
                yield policy, f"subsystem_mappings.{subsystem}.{operation_name}.{code}"
