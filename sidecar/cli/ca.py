"""`sidecar ca`: the local certificate authority, looked at, handed out, replaced.

Law: the key is never printed. A running sidecar notices another authority with its next CONNECT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from config.loader import ConfigError, load
from sidecar.cli.admin import Failed, telling_failures
from sidecar.cli.terminal import Terminal

if TYPE_CHECKING:
    from config.model import Settings
    from sidecar.authority import Authority


@telling_failures
def ca(chosen: argparse.Namespace) -> int:
    try:
        settings = load(chosen.config, os.environ).settings
    except ConfigError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    from sidecar.authority import NoAuthority

    os.umask(0o077)
    try:
        if chosen.action == "show":
            return _show(_existing(settings), as_json=chosen.json)
        if chosen.action == "export":
            return _export(settings, chosen)
        return _rotate(settings, as_json=chosen.json)
    except NoAuthority as why:
        raise Failed(str(why)) from None


def _existing(settings: Settings) -> Authority:
    from sidecar.authority import read

    state_dir = Path(settings.state_dir)
    found = read(state_dir)
    if found is None:
        raise Failed(
            f"there is no authority in {state_dir} yet, and none is needed before an upstream has `intercept: true`: "
            "then one is made when the sidecar starts, or by `sidecar ca export -c FILE` with that configuration"
        )
    if found.exposed is not None:
        print(f"Warning: {found.exposed}.", file=sys.stderr)
    return found


def _show(authority: Authority, *, as_json: bool) -> int:
    from sidecar.authority import CERTIFICATE

    certificate = authority.certificate
    shown = {
        "subject": certificate.subject.rfc4514_string(),
        "fingerprint_sha256": authority.fingerprint,
        "hosts": sorted(authority.hosts),
        "not_before": certificate.not_valid_before_utc.isoformat(),
        "not_after": certificate.not_valid_after_utc.isoformat(),
        "file": str(authority.folder / CERTIFICATE),
    }
    if as_json:
        print(json.dumps(shown, indent=2))
        return 0
    terminal = Terminal()
    for name, value in shown.items():
        text = ", ".join(value) if isinstance(value, list) else value
        for line in terminal.wrapped(f"{name.replace('_', ' '):<20}{text}", 20):
            terminal.line(line)
    return 0


def _export(settings: Settings, chosen: argparse.Namespace) -> int:
    from sidecar.authority import ensure
    from sidecar.intercept import intercepted_hosts
    from sidecar.variables import write_bundle

    hosts = intercepted_hosts(settings.upstreams.values())
    authority = ensure(Path(settings.state_dir), hosts)[0] if hosts else _existing(settings)
    pem = authority.pem
    if chosen.bundle:
        pem = write_bundle(authority.folder, authority.pem, os.environ)[0].read_bytes()
    if chosen.file is None:
        sys.stdout.write(json.dumps({"pem": pem.decode()}) + "\n" if chosen.json else pem.decode())
        return 0
    try:
        chosen.file.write_bytes(pem)
        chosen.file.chmod(0o644)  # for others to read: there is nothing secret in it
    except OSError as error:
        raise Failed(f"{chosen.file}: {error.strerror}") from None
    return 0


def _rotate(settings: Settings, *, as_json: bool) -> int:
    from sidecar.authority import rotate
    from sidecar.intercept import intercepted_hosts

    made = rotate(Path(settings.state_dir), intercepted_hosts(settings.upstreams.values()))
    if as_json:
        print(json.dumps({"fingerprint_sha256": made.fingerprint}))
    print(
        f"There is another authority now, {made.fingerprint}. Let apps trust it: start them again with `sidecar run -- "
        "CMD` or the variables of `sidecar env`, or hand out `sidecar ca export`.",
        file=sys.stderr,
    )
    return 0
