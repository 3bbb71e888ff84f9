"""Telling the service manager (systemd, `Type=notify`) how far we are.

Law: said where `NOTIFY_SOCKET` names a listener, and never more than said: whoever does not listen costs nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"


def tell(environ: Mapping[str, str], state: str, status: str) -> None:
    """`status` is for people: `systemctl status` shows it."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    line = status.replace("\n", " ")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        try:
            out.setblocking(False)
            out.sendto(f"{state}\nSTATUS={line}".encode(), address)
        except OSError:
            pass  # nobody listens; there is nobody to tell of that either
