"""Whether a host that a configuration intercepts is opened now: only the sidecar that runs knows.

Law: a question that gets no answer is said to have none, and spoils nothing of what the configuration tells.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from sidecar.cli.admin import Failed, connect
from sidecar.cli.interception import client_of, left
from sidecar.cli.whereto import Now, Way

_NAMED = 3


def as_it_is_now(way: Way, chosen: argparse.Namespace, environ: Mapping[str, str]) -> Way:
    if way.tls != "intercepted" or way.refused is not None:
        return way
    url = urlsplit(way.url)
    try:
        admin = connect(chosen, environ)
        told = admin.get("/interception", host=f"{url.netloc.rpartition('@')[2]}{'' if url.port else ':443'}")
        now = _told(told, (url.hostname or ""), admin.url)
    except Failed as failed:
        now = Now(False, None, (), f"not known, because nobody could be asked: {' '.join(str(failed).split())}")
    return dataclasses.replace(way, now=now)


def _told(told: Mapping[str, Any], host: str, sidecar: str) -> Now:
    items = told["items"]
    ids = tuple(one["id"] for one in items)
    if host not in told["hosts"]:
        return Now(
            True,
            False,
            ids,
            f"the sidecar at {sidecar} does not intercept {host}: it has another configuration in force",
        )
    if told["impossible"] is not None:
        return Now(True, False, ids, f"the sidecar at {sidecar} lets everybody through: {told['impossible']}")
    if not items:
        return Now(True, True, (), f"the sidecar at {sidecar} opens it for every client")
    clients = ", ".join(f"{client_of(one)} at {one['address']} for {left(one)}" for one in items[:_NAMED])
    count = told["total"]
    more = "" if count <= _NAMED else f" and {count - _NAMED} more"
    return Now(
        True,
        True,
        ids,
        f"the sidecar at {sidecar} lets {count} client{'' if count == 1 else 's'} through unopened: {clients}{more}. "
        f"They refused the certificate; see `sidecar interception list --host {host}`",
    )
