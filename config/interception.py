"""Interception, which opens what an application closed: only where it was asked for by name, and never to weaken it.

Pure, like `config/checks.py`, whose list it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from config.contradiction import Contradiction
from config.fallbacks import always_encrypted

if TYPE_CHECKING:
    from config.model import Settings


def interception_problems(settings: Settings) -> Iterator[Contradiction]:
    """Every `intercept: true` that would catch more than was named, or pass it on less safely than the app asked."""
    for name, upstream in settings.upstreams.items():
        if not upstream.intercept:
            continue
        above = ("upstreams", name)
        path = (*above, "intercept")
        patterns = [entry for entry in upstream.hosts if "*" in entry]
        if patterns:
            message = (
                f"only hosts that are listed by name are intercepted, and `{patterns[0]}` stands for any number of "
                "them; list the names, or give the others an upstream without `intercept`"
            )
            yield Contradiction(path, message, (path, (*above, "hosts")))
        elif not upstream.hosts:
            message = "there is nothing to intercept; list the hosts that the application calls in `hosts`"
            yield Contradiction(path, message, (path, (*above, "hosts")))
        if upstream.endpoints and not always_encrypted(upstream):
            message = (
                "the application asked for https, and its requests would go on in clear; "
                "give `endpoints` with https://, or `tls: originate`"
            )
            yield Contradiction(path, message, (path, (*above, "endpoints"), (*above, "tls")))
        if upstream.insecure_skip_verify:
            message = (
                "the application can no longer verify the upstream itself, so the sidecar has to; "
                "remove `insecure_skip_verify`, and name a private authority in `ca_bundle`"
            )
            yield Contradiction(path, message, (path, (*above, "insecure_skip_verify")))
