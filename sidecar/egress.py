"""Where requests may go: names before resolution, addresses after it.

Law: pure, apart from one question to the kernel ("is this address mine?") that is asked only when a target port
equals one of our own. Addresses are judged in their final form: IPv4 inside IPv6 (mapped, compatible, NAT64, 6to4) is
unwrapped first, so no spelling of an address gets around a rule.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

from config.model import Settings
from sidecar.failures import Refused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LINK_LOCAL: tuple[Network, ...] = (
    ipaddress.ip_network("169.254.0.0/16"),
    ipaddress.ip_network("fe80::/10"),
    ipaddress.ip_network("fd00:ec2::254/128"),
    # RFC 8215: whoever translates this prefix also chose where the IPv4 address lies in it, so it may be any of those.
    ipaddress.ip_network("64:ff9b:1::/48"),
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")  # the old ::127.0.0.1 form, still routed where a sit tunnel is up


def plain_address(text: str) -> Address:
    """The address a packet would really reach: zone dropped, embedded IPv4 taken out."""
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):  # not :: and ::1
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_own_address(address: Address) -> bool:
    """Only an address of this machine can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


class _Listed:
    """A list of names and networks from the configuration."""

    def __init__(self, entries: Iterable[str]) -> None:
        self.networks: list[Network] = []
        self.names: set[str] = set()
        self.suffixes: list[str] = []
        for entry in entries:
            try:
                self.networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                if entry.startswith("*."):
                    self.suffixes.append(entry[1:].lower())
                else:
                    self.names.add(entry.lower())

    def has_name(self, host: str) -> bool:
        return host in self.names or any(host.endswith(suffix) for suffix in self.suffixes)

    def has_address(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


class Egress:
    """The rules of `egress`, plus our own listeners, which are never a target."""

    def __init__(self, settings: Settings, own_address: Callable[[Address], bool] = is_own_address) -> None:
        self._allow = _Listed(settings.egress.allow)
        self._deny = _Listed(settings.egress.deny)
        self.configured_only = settings.egress.mode == "configured_only"
        self.connect_ports = frozenset(settings.egress.connect_ports)
        self._listeners: list[tuple[Address, int, str]] = []
        self._own_address = own_address

    def under(self, settings: Settings) -> Egress:
        """Other rules; the listeners stay."""
        egress = Egress(settings, self._own_address)
        egress._listeners = self._listeners
        return egress

    def add_listener(self, host: str, port: int, role: str) -> None:
        """`role` is `proxy` (a request to it would loop) or the name of another listener of ours."""
        self._listeners.append((plain_address(host), port, role))

    def check_name(self, host: str) -> None:
        if self._deny.has_name(host):
            raise _denied(host, "listed in egress.deny")

    def check_address(self, text: str, port: int, host: str) -> None:
        """`text` is the resolved address that would be connected to."""
        address = plain_address(text)
        role = self._own_listener(address, port)
        if role == "proxy":
            raise Refused(
                "LOOP_DETECTED",
                f"{host}:{port} is this sidecar's own listener; a request to it would come straight back",
                reason="loop",
            )
        if role is not None:
            raise _denied(host, f"port {port} is this sidecar's {role} port, which is not reachable through it")
        if self._deny.has_address(address):
            raise _denied(host, f"{address} is listed in egress.deny")
        if any(address in network for network in _LINK_LOCAL) and not (
            self._allow.has_address(address) or self._allow.has_name(host)
        ):
            raise _denied(
                host, f"{address} is a link-local or metadata address; list it in egress.allow if it is meant"
            )

    def _own_listener(self, address: Address, port: int) -> str | None:
        for own, own_port, role in self._listeners:
            if port != own_port:
                continue
            # Connecting to 0.0.0.0 or :: reaches this machine; a listener on them is reached by every own address.
            if address == own or address.is_unspecified or (own.is_unspecified and self._own_address(address)):
                return role
        return None


def _denied(host: str, why: str) -> Refused:
    return Refused("EGRESS_DENIED", f"requests to {host} are not allowed: {why}", reason="egress")
