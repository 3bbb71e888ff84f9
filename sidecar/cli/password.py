"""`sidecar password`: the hash of a password, for `listen.auth`."""

from __future__ import annotations

import argparse
import getpass
import json
import sys

from sidecar.cli.admin import Failed, telling_failures


@telling_failures
def password(chosen: argparse.Namespace) -> int:
    if sys.stdin.isatty():
        given = getpass.getpass("Password: ")
        if given != getpass.getpass("Again: "):
            raise Failed("these were two different ones")
    else:
        given = sys.stdin.readline().rstrip("\r\n")
    if not given:
        raise Failed("an empty password protects nothing; type one, or give it on standard input", 2)
    from sidecar.guard import hashed

    made = hashed(given.encode())
    print(json.dumps({"hash": made}) if chosen.json else made)
    return 0
