"""`sidecar env`: what an app needs in its environment, for a shell."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys

from config.loader import ConfigError, load
from sidecar.cli.admin import Failed, telling_failures


@telling_failures
def env(chosen: argparse.Namespace) -> int:
    try:
        loaded = load(chosen.config, os.environ)
    except ConfigError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    from sidecar.app import listener_url, trust
    from sidecar.intercept import intercepted_hosts
    from sidecar.variables import proxy_variables

    settings = loaded.settings
    if settings.listen.port == 0:
        raise Failed("listen.port is 0, so nobody knows yet which it will be; use `sidecar run -- CMD`, or set one")
    address = (settings.listen.host, settings.listen.port)
    made = proxy_variables(listener_url(settings, address), os.environ)
    if intercepted_hosts(settings.upstreams.values()):
        from sidecar.authority import NoAuthority

        os.umask(0o077)
        try:
            made |= trust(settings, os.environ)
        except NoAuthority as why:
            raise Failed(str(why)) from None
    if chosen.json:
        print(json.dumps(made, indent=2))
    else:
        for name, value in made.items():
            print(f"export {name}={shlex.quote(value)}")
    if settings.listen.auth is not None:
        print("listen.auth: put user:password@ before the host in the proxy variables", file=sys.stderr)
    return 0
