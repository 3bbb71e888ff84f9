"""TLS towards upstreams: verified, HTTP/1.1 by ALPN, sessions resumed.

Law: verification is off only where `insecure_skip_verify` says so for that upstream. Contexts are shared between
upstreams with the same settings: each one holds the whole root store, some megabytes.
"""

from __future__ import annotations

import ssl
from collections import OrderedDict
from pathlib import Path
from typing import Any

from config.model import Upstream

_REMEMBERED_SESSIONS = 256


class ResumingContext(ssl.SSLContext):
    """Resumes TLS sessions. Event loops give no way to pass a session, but all call `wrap_bio` here."""

    def __new__(cls) -> ResumingContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, ssl.SSLSession] = OrderedDict()
        self.set_alpn_protocols(["http/1.1"])
        self.hostname_checks_common_name = False  # the subject says who somebody is, not which host (RFC 9525, 2)

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        name = kwargs.get("server_hostname")
        if isinstance(name, str) and name in self._sessions:
            kwargs["session"] = self._sessions[name]
        return super().wrap_bio(*args, **kwargs)

    def remember(self, tls: ssl.SSLObject | None) -> None:
        """Called when a connection has been used: TLS 1.3 tickets arrive after the handshake."""
        if tls is None or tls.session is None or tls.server_hostname is None:
            return
        self._sessions[tls.server_hostname] = tls.session
        self._sessions.move_to_end(tls.server_hostname)
        if len(self._sessions) > _REMEMBERED_SESSIONS:
            self._sessions.popitem(last=False)


class UnusableCertificates(Exception):
    """Which, and why."""


_Made = dict[tuple[object, ...], tuple[tuple[object, ...], ResumingContext]]
"""By the files and how they are used: what the files were then, and the context."""


class TlsContexts:
    """One context per distinct combination of settings, made when first needed."""

    def __init__(self, before: TlsContexts | None = None) -> None:
        """`before`: those of the settings that were replaced. What is still right among them is used on."""
        self._made: _Made = {}
        self._before: _Made = {} if before is None else before._made

    def for_upstream(self, upstream: Upstream) -> ResumingContext:
        certificate = upstream.client_cert
        files = (upstream.ca_bundle, *((certificate.cert, certificate.key) if certificate is not None else ()))
        key, version = (files, upstream.insecure_skip_verify), tuple(map(_version, files))
        for known in (self._made.get(key), self._before.get(key)):
            if known is not None and known[0] == version:
                self._made[key] = known
                return known[1]
        context = _make(upstream)
        self._made[key] = (version, context)
        return context

    def prepare(self, name: str, upstream: Upstream) -> None:
        """Read the files that an upstream names, while it is still possible to say no."""
        if upstream.ca_bundle is None and upstream.client_cert is None:
            return
        try:
            self.for_upstream(upstream)
        except (OSError, ssl.SSLError) as error:
            raise UnusableCertificates(
                f"upstreams.{name}: its `ca_bundle` or `client_cert` cannot be used: {error}; give it PEM files, and "
                "with a certificate the key that belongs to it"
            ) from error

    def forget_before(self) -> None:
        """What nobody asked for by now was for settings, or for certificates, that are no more."""
        self._before = {}


def _version(file: Path | None) -> tuple[int, int] | None:
    """Changes with the content of a file: certificates are renewed in place."""
    try:
        seen = None if file is None else file.stat()
    except OSError:
        return None
    return None if seen is None else (seen.st_mtime_ns, seen.st_ino)


def _make(upstream: Upstream) -> ResumingContext:
    context = ResumingContext()
    if upstream.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif upstream.ca_bundle is not None:
        context.load_verify_locations(cafile=str(upstream.ca_bundle))
    else:
        context.load_default_certs()
    certificate = upstream.client_cert
    if certificate is not None:
        context.load_cert_chain(str(certificate.cert), str(certificate.key) if certificate.key else None)
    return context
