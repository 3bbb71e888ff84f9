"""The effective configuration: what is in force, and reading the file again.

Law: secrets are masked by the models that hold them. What is in force changes in `sidecar/reloading.py` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sidecar.admin.changes import Changes
from sidecar.admin.fields import Answer, Body, NoBody, NoQuery, Prose
from sidecar.admin.problem import FieldError, Problem
from sidecar.admin.route import Call, Route, Told
from sidecar.durable.trouble import Trouble
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
    renewed: tuple[str, ...]
    """`listen.tls` and `admin.tls`, where another certificate is shown from now on."""


class ReloadOrder(Body):
    """May be left out."""

    reason: Prose = ""
    """For the log and the audit."""


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
            raise Problem(409, "CONFLICT", f"nothing has changed: {refused}", field_errors(refused)) from None
        await self._changes.note(
            call.request,
            "reloaded",
            about="the configuration",
            before=done.before,
            after=done.after,
            reason=call.body.reason,
        )
        return ReloadShown(
            file=None if path is None else str(path),
            changed=tuple(ChangeShown(key=one.key, before=one.before, after=one.after) for one in done.changed),
            needs_restart=done.needs_restart,
            renewed=done.renewed,
        )


def field_errors(refused: NotApplied) -> list[FieldError]:
    """What is wrong with a configuration, key by key."""
    return [
        FieldError(
            field=problem.key or problem.file or problem.variable or "the configuration",
            value=problem.value,
            constraint="configuration",
            message=str(problem),
        )
        for problem in refused.problems
    ]


def of_trouble(trouble: Trouble) -> Problem:
    """What the store refused."""
    return Problem(trouble.status, trouble.code, str(trouble))
