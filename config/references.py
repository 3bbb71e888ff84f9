"""Names in the configuration that must lead somewhere: policies, error codes, subsystems, operations, fallbacks.

Pure, like `config/checks.py`, whose list it belongs to: contradictions come out, nothing is raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from config.contradiction import Contradiction, KeyPath

if TYPE_CHECKING:
    from config.model import Settings


def dangling_names(settings: Settings) -> Iterator[Contradiction]:
    """Every name that leads nowhere."""
    yield from _unknown_policies(settings)


def _unknown_policies(settings: Settings) -> Iterator[Contradiction]:
    known = tuple(settings.policies)
    for path, name in _named_policies(settings):
        if name not in settings.policies:
            message = f"there is no policy of this name under `policies` (there is: {', '.join(known)})"
            yield Contradiction(path, message, (path, ("policies", name)), known)


def _named_policies(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    for name, upstream in settings.upstreams.items():
        yield ("upstreams", name, "policy"), upstream.policy
