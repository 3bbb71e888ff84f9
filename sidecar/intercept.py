"""Interception: TLS of the app ends here, for the listed hosts only, and for clients that trust our authority.

Law: what cannot be opened is passed on closed. A host that is not listed, a client that refused our certificate, and
an authority that cannot be used all lead to an opaque tunnel, never to an error of the app's own making. Nothing of
this is loaded before an upstream says `intercept: true`.
"""

from __future__ import annotations

import os
import ssl
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from config.addresses import parse_host_entry
from config.model import Upstream
from sidecar import clock
from sidecar.failures import Intercepted
from sidecar.handshakes import CERTIFICATE_REFUSED, UNUSED
from sidecar.policy.demotion import Client, Demotions, Program
from sidecar.routing import Origin
from telemetry.names import Field

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from config.model import Settings
    from sidecar.authority import Authority
    from sidecar.proxy import Proxy
    from sidecar.request import Request
    from sidecar.socket_owner import SocketOwners
    from sidecar.upstream.endpoints import UpstreamState

_LEAF_USED_FOR = 12 * 3600.0  # half of what it is valid for
_LEAVES = 256
_LONGEST_AGENT = 100


def intercepted_hosts(upstreams: Iterable[Upstream]) -> frozenset[str]:
    """All hosts that are intercepted, without their ports."""
    return frozenset(
        parse_host_entry(entry).host for upstream in upstreams if upstream.intercept for entry in upstream.hosts
    )


class Interception:
    """See the module's law. One for the whole sidecar."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.demotions = Demotions()
        self._owners: SocketOwners | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.impossible: str | None = None
        """Why nothing could be opened when it was last tried."""
        self._authority: Authority | None = None
        self._made_for: Settings | None = None
        self._kept_at = 0
        self._leaves: OrderedDict[str, tuple[ssl.SSLContext, float]] = OrderedDict()

    def prepare(self) -> None:
        """At the start, where something is intercepted: apps have to be told whom to trust before they call."""
        from sidecar.authority import CERTIFICATE, NoAuthority

        try:
            authority = self._current_authority()
        except NoAuthority as why:
            self._impossible(str(why))
            return
        self._proxy.log.info(
            "sidecar.interception.ready",
            f"HTTPS is opened for {', '.join(sorted(authority.hosts))}; applications have to trust "
            f"{authority.folder / CERTIFICATE} (`sidecar env`, `sidecar ca export`)",
            fingerprint=authority.fingerprint,
        )

    def upstream_of(self, origin: Origin) -> UpstreamState | None:
        """Whose requests are inside a CONNECT to there, if it is one that may be opened."""
        directory = self._proxy.directory
        name = directory.router.by_host(origin.host, origin.port)
        if name is None or not directory.configured[name].settings.intercept:
            return None
        return directory.configured[name]

    async def client_of(self, request: Request, origin: Origin, app: asyncio.Transport | None) -> Client:
        """Who asks for this CONNECT."""
        agent = (request.value(b"user-agent") or b"").decode("latin-1")[:_LONGEST_AGENT]
        peer = app.get_extra_info("peername") if app is not None else None
        return Client(origin.label, peer[0] if peer else "", agent, await self._program_at(app))

    def look_at(self, client: Client, origin: Origin, upstream: UpstreamState) -> None:
        """Raises Intercepted if this CONNECT is to be opened; otherwise it becomes a tunnel."""
        if self.demotions.demoted(client, clock.monotonic()):
            return
        from sidecar.authority import NoAuthority

        try:
            context = self._leaf(origin.host)
        except (NoAuthority, OSError, ssl.SSLError) as why:
            self._impossible(str(why))
            return
        self.impossible = None
        self._proxy.handshakes.check_room()
        raise Intercepted(origin, upstream, client, context)

    async def _program_at(self, app: asyncio.Transport | None) -> Program | None:
        """Asked now, while it waits for our answer: whoever refuses a certificate may be gone right after that."""
        if app is None:
            return None
        from sidecar.socket_owner import SocketOwners, on_loopback

        peer, ours = app.get_extra_info("peername"), app.get_extra_info("sockname")
        caller, called = (on_loopback(end[0]) if end else None for end in (peer, ours))
        if caller is None or called is None:
            return None
        if self._owners is None:
            from concurrent.futures import ThreadPoolExecutor

            self._owners = SocketOwners()
            self._thread = ThreadPoolExecutor(1, "socket-owner")
        own, other = (called, int(ours[1])), (caller, int(peer[1]))
        return await self._proxy.loop.run_in_executor(self._thread, self._owners.program_at, other, own)

    def take(self, transport: asyncio.Transport, tail: bytes, taken: Intercepted, *, granted: bool) -> None:
        """Say 200, if it was not granted before, and begin TLS."""
        from sidecar.secured import Secured

        client, label = taken.client, taken.upstream.label

        def used() -> None:
            self.demotions.used(client)

        def left_unused() -> None:
            self._proxy.metrics.tls_client_errors[UNUSED] += 1
            self._demoted(client, label, "it ended TLS without asking for anything", refused=False)

        def failed(word: str, why: str) -> None:
            if word == CERTIFICATE_REFUSED:
                self._demoted(client, label, why, refused=True)
            else:
                self._proxy.handshakes.tell(word, f"TLS of {_shown(client)} failed: {why}")

        listener = self._proxy.listener
        assert listener is not None
        secured = Secured(listener, taken.origin, used, left_unused)
        if not granted:
            transport.write(b"HTTP/1.1 200 Connection established\r\n%b\r\n" % taken.upstream.answer_lines)
        self._proxy.handshakes.begin(transport, tail, taken.context, secured, failed)

    def _demoted(self, client: Client, upstream: str, why: str, *, refused: bool) -> None:
        now, demotions = clock.monotonic(), self.demotions
        seconds = demotions.refused(client, now, why) if refused else demotions.unused(client, now, why)
        if seconds is not None:
            self._proxy.signals.demoted(upstream, client.host, _shown(client), why, seconds)

    def _impossible(self, why: str) -> None:
        self.impossible = why
        fields = {Field.BODY: f"nothing can be intercepted, HTTPS passes as a tunnel: {why}"}
        self._proxy.log.event("error", "sidecar.interception.impossible", "", clock.monotonic(), lambda: fields)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- certificates ----------------------------------------------------------------------------------------

    def clock_stepped(self) -> None:
        """What was made for the time before may not be valid now."""
        self._leaves.clear()
        self._made_for = None

    def _leaf(self, host: str) -> ssl.SSLContext:
        authority, now = self._current_authority(), clock.monotonic()
        kept = self._leaves.get(host)
        if kept is not None and now < kept[1]:
            self._leaves.move_to_end(host)
            return kept[0]
        context = authority.leaf(host)

        def right_host(_: object, name: str | None, __: ssl.SSLContext) -> int | None:
            if name is None or name.lower().removesuffix(".") == host:
                return None
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

        context.sni_callback = right_host
        self._leaves[host] = (context, now + _LEAF_USED_FOR)
        if len(self._leaves) > _LEAVES:
            self._leaves.popitem(last=False)
        return context

    def _current_authority(self) -> Authority:
        """As it is on disk and for the hosts of the settings in force: both may have changed since."""
        from sidecar.authority import WHOLE, ensure

        settings = self._proxy.settings
        folder = Path(settings.state_dir)
        kept_at = _changed_at(folder / WHOLE)
        if self._authority is None or settings is not self._made_for or kept_at != self._kept_at:
            before = None if self._authority is None else self._authority.fingerprint
            self._authority, replaced = ensure(folder, intercepted_hosts(settings.upstreams.values()))
            self._made_for, self._kept_at = settings, _changed_at(folder / WHOLE)
            self._leaves.clear()
            if self._authority.exposed is not None:
                self._proxy.log.warn("sidecar.interception.key_exposed", self._authority.exposed)
            if replaced or before not in (None, self._authority.fingerprint):
                self._proxy.log.warn(
                    "sidecar.interception.new_authority",
                    "there is a new certificate authority, which applications have to trust anew: "
                    "`sidecar ca export`, or start them again with `sidecar run -- CMD`",
                    fingerprint=self._authority.fingerprint,
                )
        return self._authority


def _changed_at(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return 0


def _shown(client: Client) -> str:
    program = f" (TLS {client.hello})" if client.hello else ""
    if client.program is not None:
        program = f" ({client.program.name}, {client.program.digest})"
    return f"{client.agent or 'a client without a name'}{program} at {client.address} to {client.host}"
