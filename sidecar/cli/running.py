"""`sidecar run`: the proxy itself, alone or for one command.

Law: what `--intercept` and `-- CMD` mean is said as `SIDECAR__…` variables of this process, so that a reload of the
file does not forget it; the app does not see them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from config.addresses import parse_host_entry
from config.loader import ConfigError, Loaded, load
from config.model import Settings


class WrongUse(Exception):
    """Told to the person."""


def run(chosen: argparse.Namespace) -> int:
    before = dict(os.environ)
    try:
        if chosen.takeover and chosen.behind is not None:
            raise WrongUse("--takeover is for a sidecar that serves on; one that runs a command ends with it")
        if chosen.behind == []:
            raise WrongUse("there is no command behind `--`")
        loaded = load(chosen.config, os.environ)
        said = _meant(loaded, chosen.intercept, for_command=chosen.behind is not None)
        if said:
            os.environ.update(said)
            loaded = load(chosen.config, os.environ)
    except (ConfigError, WrongUse) as wrong:
        print(wrong if isinstance(wrong, ConfigError) else f"sidecar run: {wrong}", file=sys.stderr)
        return 2
    from sidecar import lifecycle  # not before the configuration is known to be good: it is most of the start

    if chosen.behind is None:
        return lifecycle.run(loaded, takeover=chosen.takeover)
    from sidecar.app import App

    return lifecycle.run(loaded, App(chosen.behind, before))


def _meant(loaded: Loaded, hosts: list[str], *, for_command: bool) -> dict[str, str]:
    """The variables that say the same as the options."""
    said: dict[str, str] = {}
    for host in hosts:
        said |= _intercept(loaded.settings, host)
    if for_command:
        # Beside its app it takes whatever is free, and keeps quiet about what is well.
        for key, value in (("listen.port", "0"), ("admin.port", "0"), ("telemetry.log.level", "warn")):
            if loaded.origins.get(key, "default") == "default":
                said["SIDECAR__" + key.upper().replace(".", "__")] = value
    return said


def _intercept(settings: Settings, host: str) -> dict[str, str]:
    try:
        wanted = parse_host_entry(host)
    except ValueError as wrong:
        raise WrongUse(f"--intercept {host[:100]}: {wrong}") from None
    if wanted.wildcard:
        raise WrongUse(f"--intercept {host[:100]}: only hosts named one by one are intercepted; repeat the option")
    for name, upstream in settings.upstreams.items():
        if str(wanted) in upstream.hosts:
            return {f"SIDECAR__UPSTREAMS__{name}": json.dumps({"intercept": True})}
        if any(entry.startswith("*.") and wanted.host.endswith(entry[1:]) for entry in upstream.hosts):
            raise WrongUse(
                f"--intercept {host[:100]}: it belongs to upstream {name} by `*.…`; list it in the `hosts` of an "
                "upstream of its own, with `intercept: true`"
            )
    upstream_name = str(wanted).replace(":", "-").replace("[", "").replace("]", "")
    return {f"SIDECAR__UPSTREAMS__{upstream_name}": json.dumps({"hosts": [str(wanted)], "intercept": True})}
