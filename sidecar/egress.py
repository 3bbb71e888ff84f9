"""Where requests may go: names before resolution, addresses after it.

Law: pure, apart from one question to the kernel ("is this address mine?") that is asked only when a target port
equals one of our own. An address is judged as everything that a packet to it may reach: as it is written, as the IPv4
address inside it (mapped, translated, compatible, NAT64, 6to4, Teredo, ISATAP), and the unspecified one, which the
kernel takes for loopback, as loopback. One of these that is denied is enough, so no spelling gets around a rule.
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
_LAST_32_BITS: tuple[ipaddress.IPv6Network, ...] = (
    ipaddress.IPv6Network("64:ff9b::/96"),  # NAT64
    ipaddress.IPv6Network("::ffff:0:0:0/96"),  # translated, RFC 2765
    ipaddress.IPv6Network("::/96"),  # the old ::127.0.0.1 form, still routed where a sit tunnel is up
)
"""Prefixes behind which an IPv4 address follows."""
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_ISATAP = frozenset((0x00005EFE, 0x02005EFE))
_LOOPBACK: tuple[Address, ...] = (ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1"))


def plain_address(text: str) -> Address:
    """The address itself: zone dropped, and IPv4 that was only written as IPv6 (mapped) taken out."""
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def reached(text: str) -> tuple[Address, ...]:
    """All that a packet to this address may reach, the address itself first."""
    address = plain_address(text)
    found = [address]
    if ":" in text:
        written = ipaddress.IPv6Address(text.partition("%")[0])
        found += [written, *_inside(written)]
    if any(one.is_unspecified for one in found):
        found += _LOOPBACK
    return tuple(dict.fromkeys(found))


def _inside(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that a translator or a tunnel would take out of this one."""
    bits = int(address)
    last = ipaddress.IPv4Address(bits & 0xFFFFFFFF)
    if any(address in prefix for prefix in _LAST_32_BITS):
        return [] if bits <= 1 else [last]  # :: and ::1 are what they are
    if (bits >> 32) & 0xFFFFFFFF in _ISATAP:
        return [last]
    if address.sixtofour is not None:
        return [address.sixtofour]
    return [] if address.teredo is None else list(address.teredo)


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
                self.networks.append(_unmapped(ipaddress.ip_network(entry, strict=False)))
            except ValueError:
                if entry.startswith("*."):
                    self.suffixes.append(entry[1:].lower())
                else:
                    self.names.add(entry.lower())

    def has_name(self, host: str) -> bool:
        return host in self.names or any(host.endswith(suffix) for suffix in self.suffixes)

    def has_address(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def _unmapped(network: Network) -> Network:
    """`::ffff:10.0.0.0/104` is another way to write 10.0.0.0/8."""
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        inside = ipaddress.IPv4Address(int(network.network_address) & 0xFFFFFFFF)
        return ipaddress.IPv4Network((inside, network.prefixlen - 96))
    return network


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
        addresses = reached(text)
        role = self._own_listener(addresses, port)
        if role == "proxy":
            raise Refused(
                "LOOP_DETECTED",
                f"{host}:{port} is this sidecar's own listener; a request to it would come straight back",
                reason="loop",
            )
        if role is not None:
            raise _denied(host, f"port {port} is this sidecar's {role} port, which is not reachable through it")
        for address in addresses:
            if self._deny.has_address(address):
                raise _denied(host, f"{_led(text, address)} is listed in egress.deny")
        if self._allow.has_name(host):
            return
        for address in addresses:
            if any(address in network for network in _LINK_LOCAL) and not self._allow.has_address(address):
                why = "is a link-local or metadata address; list it in egress.allow if it is meant"
                raise _denied(host, f"{_led(text, address)} {why}")

    def _own_listener(self, addresses: tuple[Address, ...], port: int) -> str | None:
        for own, own_port, role in self._listeners:
            if port != own_port:
                continue
            # A listener on 0.0.0.0 or :: is reached by every own address.
            if own in addresses or (own.is_unspecified and any(map(self._own_address, addresses))):
                return role
            if addresses[0].is_unspecified:  # this machine, whichever of its addresses the kernel takes
                return role
        return None


def _led(text: str, address: Address) -> str:
    """What was found, and by way of what."""
    return str(address) if str(address) == text else f"{address} (reached as {text})"


def _denied(host: str, why: str) -> Refused:
    return Refused("EGRESS_DENIED", f"requests to {host} are not allowed: {why}", reason="egress")
