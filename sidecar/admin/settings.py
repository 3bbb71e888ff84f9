"""What is in force: the effective configuration, and its policies with who uses them.

Law: reads only; secrets are masked by the models that hold them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from config.loader import Loaded
from config.model import SHIPPED, Settings
from config.policy import Policy
from sidecar.admin.fields import Answer, NoBody, NoQuery
from sidecar.admin.problem import unknown
from sidecar.admin.route import Call, Route, Told
from sidecar.proxy import Proxy


class Configuration(Answer):
    """Every setting, with where it came from."""

    file: str | None
    """The configuration file; null when there is none."""
    settings: Mapping[str, Any]
    """As in the file, complete; `sidecar schema` describes it."""
    origins: Mapping[str, str]
    """By dotted key: default, file or environment."""


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

    def __init__(self, proxy: Proxy, loaded: Loaded) -> None:
        self._proxy = proxy
        self._loaded = loaded

    def routes(self) -> Iterator[Route]:
        yield Route("GET", "/config", "The configuration in force.", self.config, Configuration)
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
        return {
            "file": None if self._loaded.path is None else str(self._loaded.path),
            "settings": self._loaded.settings.model_dump(mode="json"),
            "origins": self._loaded.origins,
        }

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
