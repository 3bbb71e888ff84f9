"""What a listener with TLS shows, and how a renewed certificate takes its place.

Law: a pair of files is loaded whole, aside, before it is shown; one that cannot be used changes nothing. Handshakes
that begin later see the new one, connections that are open keep theirs. Whoever renews a certificate writes over its
files, so whether there is a new one is told by what the files look like.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from config.model import ServerCertificate
from sidecar.upstream.tls import UnusableCertificates
from sidecar.watching import Look, look_at


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate with its key, ready to be shown."""

    files: ServerCertificate
    looked: tuple[Look | None, Look | None]
    context: ssl.SSLContext


class Shown:
    """What one listener shows. `role` is its section in the configuration."""

    __slots__ = ("_pair", "role")

    def __init__(self, role: str, files: ServerCertificate) -> None:
        self.role = role
        self._pair = load_pair(role, files)

    @property
    def context(self) -> ssl.SSLContext:
        return self._pair.context

    def another(self, files: ServerCertificate) -> Pair | None:
        """What these files hold, if it is not shown already. Raises UnusableCertificates."""
        if files == self._pair.files and _look(files) == self._pair.looked:
            return None
        return load_pair(self.role, files)

    def show(self, pair: Pair) -> None:
        self._pair = pair


def load_pair(role: str, files: ServerCertificate) -> Pair:
    """For TLS 1.2 or newer. Raises UnusableCertificates."""
    looked = _look(files)  # first: what is written meanwhile looks different the next time
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(files.cert, files.key)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or error.strerror or str(error)
        raise UnusableCertificates(
            f"{role}.tls: {files.cert} and {files.key} cannot be used: {why}; "
            "give the certificate and the key that belongs to it"
        ) from error
    return Pair(files, looked, context)


def _look(files: ServerCertificate) -> tuple[Look | None, Look | None]:
    return look_at(files.cert), look_at(files.key)
