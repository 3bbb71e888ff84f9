"""The retry policies: what is in force, who uses it, and changing one while the sidecar runs.

Law: a policy set here stands for the whole policy of that name in the file, and outlives restarts, until it is taken
away again, or its time is over; then the file's is back. It is validated like the file, whole, before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from config.durable import UNHURRIED, Outbox
from config.loader import Origin
from config.model import SHIPPED, Settings
from config.policy import Policy
from config.runtime import LONGEST, POLICIES, Runtime, policy_key
from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Body, Duration, NoBody, NoQuery, Prose, Query
from sidecar.admin.problem import FieldError, Problem, invalid, unknown
from sidecar.admin.route import Call, Route, Told
from sidecar.admin.settings import field_errors, of_trouble
from sidecar.durable.trouble import Trouble
from sidecar.proxy import Proxy
from sidecar.reloading import NotApplied, Reloading
from telemetry.timestamps import rfc3339


class PolicyShown(Answer):
    """One policy, complete."""

    id: str
    shipped: bool
    """It exists without any configuration."""
    changed: tuple[str, ...]
    """The keys that the configuration itself gives; the others are shipped, or from `global_defaults`."""
    origin: Origin
    """Where it is from: default (shipped), file, environment or runtime."""
    used_by: tuple[str, ...]
    """Where it is named, and what it is for where none is named. The policies of error codes follow on those codes
    wherever nothing else is said."""
    until: str | None = None
    """When one that was set at run time goes again by itself."""
    policy: Policy


class Policies(Answer):
    """All of them."""

    items: tuple[PolicyShown, ...]
    next_cursor: None = None


class ReasonQuery(Query):
    """Why."""

    reason: Prose = ""
    """For the log and the audit."""


class SetQuery(ReasonQuery):
    """Why, and for how long."""

    ttl: Annotated[Duration, Field(gt=0, le=LONGEST)] | None = None
    """For how long: 90s, 10m, 2h, or seconds; at most 30 days. Then it is taken away again by itself. Not given: until
    it is removed."""


class PolicyGiven(Policy, Body):
    """A policy as in the file; what is left out is as in `global_defaults`, or as shipped."""


class PolicyRemoved(Answer):
    """What is in force now that the one set at run time is not."""

    id: str
    policy: PolicyShown | None
    """null: there is none of this name any more."""


class RetryPolicies:
    """The handlers."""

    def __init__(self, proxy: Proxy, reloading: Reloading, changes: Changes) -> None:
        self._proxy = proxy
        self._reloading = reloading
        self._changes = changes

    def routes(self) -> Iterator[Route]:
        parts = {"id": "The name of a policy."}
        yield Route("GET", "/policies", "Every retry policy, with who uses it.", self.policies, Policies)
        yield Route(
            "GET", "/policies/{id}", "One retry policy.", self.policy, PolicyShown, parts=parts, refusals=(404,)
        )
        yield Route(
            "PUT",
            "/policies/{id}",
            "Set a retry policy, over the file, until it is removed or its time is over.",
            self.put,
            PolicyShown,
            SetQuery,
            PolicyGiven,
            parts=parts,
            refusals=(413, 415, 500, 503),
        )
        yield Route(
            "DELETE",
            "/policies/{id}",
            "Remove a policy that was set at run time; the file's is back.",
            self.delete,
            PolicyRemoved,
            ReasonQuery,
            parts=parts,
            refusals=(404, 409, 500, 503),
        )

    async def policies(self, call: Call[NoQuery, NoBody]) -> Told:
        users = self._users()
        policies = self._proxy.settings.policies
        return Policies(items=tuple(self._shown(name, policy, users) for name, policy in policies.items()))

    async def policy(self, call: Call[NoQuery, NoBody]) -> Told:
        name = call.named("id")
        policy = self._proxy.settings.policies.get(name)
        if policy is None:
            raise unknown(
                "id", name, self._proxy.settings.policies, f"no policy is called {name[:60]!r}", "GET /policies"
            )
        return self._shown(name, policy, self._users())

    def _users(self) -> Mapping[str, tuple[str, ...]]:
        places: dict[str, list[str]] = {}
        for policy, place in _places(self._proxy.settings):
            places.setdefault(policy, []).append(place)
        for entry in self._proxy.registry.values():
            if entry.policy is not None:
                places.setdefault(entry.policy, []).append(f"error code {entry.code}")
        places.setdefault("default", []).append("whatever nothing else is chosen for")
        places.setdefault(Outbox().policy, []).append("deliveries of the outbox, unless outbox.policy names another")
        full = "deliveries to a provider that has had enough, unless outbox.policy or outbox.policies says otherwise"
        places.setdefault(UNHURRIED, []).append(full)
        return {policy: tuple(named) for policy, named in places.items()}

    async def put(self, call: Call[SetQuery, PolicyGiven]) -> Told:
        name, given = call.named("id"), call.body.model_dump(mode="json", exclude_unset=True)
        before, ttl, reloading = self._given(name), call.query.ttl, self._reloading
        until = reloading.after(ttl)
        try:
            await reloading.set(lambda runtime: runtime.with_policy(name, given, until), f"PUT /policies/{name[:63]}")
        except NotApplied as refused:
            raise invalid(_of_the_policy(name, refused)) from None
        except Trouble as trouble:
            raise of_trouble(trouble) from None
        await self._changes.note(
            call.request,
            "set",
            about=f"policy {name}",
            before=before,
            after=self._given(name) if ttl is None else {"policy": self._given(name), "for_seconds": ttl},
            reason=call.query.reason,
        )
        return self._shown(name, self._proxy.settings.policies[name], self._users())

    async def delete(self, call: Call[ReasonQuery, NoBody]) -> Told:
        name, known = call.named("id"), self._proxy.settings.policies
        if name not in known and name not in self._reloading.runtime.policies:
            raise unknown("id", name, known, f"no policy is called {name[:60]!r}", "GET /policies")
        if name not in self._reloading.runtime.policies:
            raise Problem(
                409,
                "CONFLICT",
                f"policy {name} was not set at run time, so there is nothing to remove; change the configuration file, "
                f"or set another over it with PUT /policies/{name}",
            )
        before = self._given(name)
        try:
            await self._reloading.set(lambda runtime: runtime.without_policy(name), f"DELETE /policies/{name}")
        except NotApplied as refused:
            raise Problem(409, "CONFLICT", f"nothing has changed: {refused}", field_errors(refused)) from None
        except Trouble as trouble:
            raise of_trouble(trouble) from None
        await self._changes.note(
            call.request,
            "removed",
            about=f"policy {name}, set at run time",
            before=before,
            after=self._given(name),
            reason=call.query.reason,
        )
        left = self._proxy.settings.policies.get(name)
        return PolicyRemoved(id=name, policy=None if left is None else self._shown(name, left, self._users()))

    def _given(self, name: str) -> object:
        """What somebody wrote of a policy, for the audit."""
        return self._reloading.given(policy_key(name))

    def _shown(self, name: str, policy: Policy, users: Mapping[str, tuple[str, ...]]) -> PolicyShown:
        until = self._reloading.runtime.until.get(policy_key(name))
        return PolicyShown(
            id=name,
            shipped=name in SHIPPED,
            changed=tuple(sorted(policy.model_fields_set)),
            origin=self._origin(name, policy),
            used_by=users.get(name, ()),
            until=None if until is None else rfc3339(until),
            policy=policy,
        )

    def _origin(self, name: str, policy: Policy) -> Origin:
        runtime: Runtime = self._reloading.runtime
        if name in runtime.policies:
            return "runtime"
        found = {self._reloading.loaded.origins.get(f"{POLICIES}.{name}.{key}") for key in policy.model_fields_set}
        return "environment" if "environment" in found else "file" if policy.model_fields_set else "default"


def _of_the_policy(name: str, refused: NotApplied) -> list[FieldError]:
    """What is wrong with a policy that was sent: by its own keys, for it stands in no file."""
    own = f"{POLICIES}.{name}"
    told = []
    for problem, error in zip(refused.problems, field_errors(refused), strict=True):
        if problem.key == own or problem.key.startswith(f"{own}."):
            message = str(replace(problem, key="", file=None, variable=None))
            error = error.model_copy(update={"field": problem.key[len(own) + 1 :] or "id", "message": message})
        told.append(error)
    return told


def _places(settings: Settings) -> Iterator[tuple[str, str]]:
    """Every key that names a policy, as (policy, dotted key)."""
    for name, upstream in settings.upstreams.items():
        if upstream.chosen_policy is not None:
            yield upstream.chosen_policy, f"upstreams.{name}.policy"
        if "policy" in upstream.outbox.model_fields_set:
            yield upstream.outbox.policy, f"upstreams.{name}.outbox.policy"
        for code, policy in (upstream.outbox.policies or {}).items():
            yield policy, f"upstreams.{name}.outbox.policies.{code}"
        for operation in upstream.operations:
            if operation.policy is not None:
                yield operation.policy, f"upstreams.{name}.operations.{operation.name}.policy"
    for subsystem, operations in settings.subsystem_mappings.items():
        for operation_name, codes in operations.items():
            for code, policy in codes.items():
                yield policy, f"subsystem_mappings.{subsystem}.{operation_name}.{code}"
