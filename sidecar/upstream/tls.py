"""TLS towards upstreams: verified, HTTP/1.1 by ALPN, sessions resumed.

Law: verification is off only where `insecure_skip_verify` says so for that upstream. Contexts are shared between
upstreams with the same settings: each one holds the whole root store, some megabytes.
"""

from __future__ import annotations

import ssl
from collections import OrderedDict
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


class TlsContexts:
    """One context per distinct combination of settings, made when first needed."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], ResumingContext] = {}

    def for_upstream(self, upstream: Upstream) -> ResumingContext:
        key = (upstream.ca_bundle, upstream.client_cert, upstream.insecure_skip_verify)
        context = self._made.get(key)
        if context is None:
            context = self._made[key] = _make(upstream)
        return context


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
