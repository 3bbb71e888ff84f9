"""How hosts, routes, endpoints and egress entries are written, and their one canonical spelling.

Words: a *host* is a name or an IP address without brackets; a *host entry* is what `hosts:` takes
(`host`, `host:port`, `*.suffix`); an *endpoint* is where an upstream is reached (`https://host:port`).
Everything here is pure text: no name is ever resolved. A refusal is a ValueError whose message says what
to write instead and never repeats the text it refuses, because that may hold a password.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")  # `_` because container names use it
_ENDPOINT = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<rest>.*)", re.DOTALL)
_ROUTE_SEGMENT = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})+")
DEFAULT_PORTS = {"http": 80, "https": 443}


class HostEntry(NamedTuple):
    """One entry of `hosts`, taken apart."""

    host: str
    """Lower case, punycode, IPv6 without brackets; for a wildcard the part after `*.`."""
    port: int | None
    """None matches every port."""
    wildcard: bool

    def __str__(self) -> str:
        return ("*." if self.wildcard else "") + join_host_port(self.host, self.port)


class Endpoint(NamedTuple):
    """Where an upstream is reached, taken apart."""

    scheme: str
    host: str
    port: int
    """The one given, else the scheme's own: 80 or 443."""

    def __str__(self) -> str:
        port = None if self.port == DEFAULT_PORTS[self.scheme] else self.port
        return f"{self.scheme}://{join_host_port(self.host, port)}"


def join_host_port(host: str, port: int | None) -> str:
    """`host:port` as it is written in a URL or a Host header, IPv6 in brackets."""
    bracketed = f"[{host}]" if ":" in host else host
    return bracketed if port is None else f"{bracketed}:{port}"


def canonical_host(text: str) -> str:
    """A host name or IP address in its one spelling: lower case, punycode, no final dot, IPv6 compressed."""
    if not text:
        raise ValueError("the host is missing")
    if any(character.isspace() or not character.isprintable() for character in text):
        raise ValueError("a host may not contain spaces or control characters")
    if text.startswith("[") and text.endswith("]"):
        if ":" not in text:
            raise ValueError("brackets are for IPv6 addresses only, as in [::1]")
        text = text[1:-1]
    if "%" in text:
        raise ValueError("an address with a zone (`%eth0`) cannot be used here; name the address without it")
    if ":" in text:
        return _canonical_ipv6(text)
    name = _ascii_name(text.removesuffix("."))
    labels = name.split(".")
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        return _canonical_ipv4(name)
    if len(name) > 253:
        raise ValueError("a host name has at most 253 characters")
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(
            "this is not a host name: labels of at most 63 letters, digits and hyphens, joined by single dots"
        )
    return name


def parse_host_entry(text: str) -> HostEntry:
    """Take one entry of `hosts` apart: `host`, `host:port`, `*.suffix` or `*.suffix:port`."""
    _refuse_url_parts(text)
    if text == "*":
        raise ValueError(
            "`*` alone is not allowed; a host that no upstream names is served with the defaults anyway, "
            "and `route: /` catches every path"
        )
    wildcard = text.startswith("*.")
    host_text, port = _split_port(text[2:] if wildcard else text)
    if "*" in host_text:
        raise ValueError("`*` may only stand at the very beginning, followed by a dot: *.example.com")
    host = canonical_host(host_text)
    if wildcard and is_ip_address(host):
        raise ValueError("`*.` goes with a name, not with an IP address")
    return HostEntry(host, port, wildcard)


def parse_endpoint(text: str) -> Endpoint:
    """Take an endpoint apart: `http://host[:port]` or `https://host[:port]` and nothing more."""
    match = _ENDPOINT.fullmatch(text)
    if match is None:
        raise ValueError("an endpoint begins with http:// or https://, as in https://api.example.com:8443")
    scheme, authority, rest = match["scheme"].lower(), match["authority"], match["rest"]
    if scheme not in DEFAULT_PORTS:
        raise ValueError("an endpoint is reached by http:// or https:// only")
    if "@" in authority:
        raise ValueError(
            "an endpoint may not carry a user or password; the application sends its credentials in headers"
        )
    if "#" in rest:
        raise ValueError("an endpoint may not have a fragment; remove `#` and what follows")
    if "?" in rest:
        raise ValueError("an endpoint may not have a query; remove `?` and what follows")
    if rest not in ("", "/"):
        raise ValueError("an endpoint may not have a path: the path of the request is used; end it after host and port")
    host_text, port = _split_port(authority)
    if "*" in host_text:
        raise ValueError("an endpoint is one host; `*` belongs in `hosts`")
    return Endpoint(scheme, canonical_host(host_text), DEFAULT_PORTS[scheme] if port is None else port)


def canonical_egress_entry(text: str) -> str:
    """An entry of `egress.allow` or `egress.deny`: an IP address, a network, a host or `*.suffix`."""
    if "/" in text and "://" not in text:
        try:
            return str(ipaddress.ip_network(text))
        except ValueError:
            pass
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError("this is not a network; write one as 10.0.0.0/8 or fd00::/8") from None
        raise ValueError(f"the address has bits set beyond its prefix; did you mean {network}?")
    if text == "*":
        raise ValueError(
            "`*` alone is not allowed; list networks, hosts or `*.suffix`, "
            "or set `egress.mode: configured_only` to refuse whatever no upstream names"
        )
    entry = parse_host_entry(text)
    if entry.port is not None:
        raise ValueError("a port cannot be given here; the entry holds for every port")
    return f"*.{entry.host}" if entry.wildcard else entry.host


def canonical_route(text: str) -> str:
    """A path prefix: begins with `/`, whole segments, no final slash (`/` alone catches everything)."""
    if not text.startswith("/"):
        raise ValueError("a route begins with a slash, as in /payments")
    if text == "/":
        return text
    trimmed = text.removesuffix("/")
    if "?" in trimmed or "#" in trimmed:
        raise ValueError("a route is a path only; remove the query or fragment")
    for segment in trimmed[1:].split("/"):
        if segment == "":
            raise ValueError("a route may not contain an empty segment (two slashes in a row)")
        if segment in (".", ".."):
            raise ValueError("a route may not contain the segments `.` or `..`")
        if not _ROUTE_SEGMENT.fullmatch(segment):
            raise ValueError(
                "a route is matched byte for byte, so other characters are percent-encoded: `%20` for a space"
            )
    return trimmed


def canonical_bind_host(text: str) -> str:
    """The address of a listener; an IPv6 zone is fine here, an empty host (every interface) is not."""
    if text == "":
        raise ValueError("an empty host would mean every interface; write 0.0.0.0 or :: if that is what you want")
    if text == "*":
        raise ValueError("write 0.0.0.0 or :: for every interface")
    address, percent, zone = text.strip("[]").partition("%")
    if percent and ":" in address and re.fullmatch(r"[A-Za-z0-9_.-]+", zone):
        return f"{canonical_host(address)}%{zone}"
    _refuse_url_parts(text)
    if text.count(":") == 1:
        raise ValueError("the port has a key of its own: `port`")
    return canonical_host(text)


def is_ip_address(host: str) -> bool:
    """Whether a canonical host is an address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_unspecified(host: str) -> bool:
    """Whether it stands for every address of the machine, as 0.0.0.0 and :: do."""
    return is_ip_address(host) and ipaddress.ip_address(host).is_unspecified


def is_loopback(host: str) -> bool:
    """Whether a canonical host can only be reached from this machine. Names other than localhost are not
    trusted."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _refuse_url_parts(text: str) -> None:
    if "://" in text:
        raise ValueError("write the host without http:// or https://")
    if "@" in text:
        raise ValueError("a host may not carry a user or password")
    if "/" in text:
        raise ValueError("write the host without a path")


def _split_port(text: str) -> tuple[str, int | None]:
    """Separate an optional port; a bare IPv6 address has none."""
    if text.startswith("["):
        host, bracket, after = text.partition("]")
        if not bracket:
            raise ValueError("the closing bracket of the IPv6 address is missing")
        if after and not after.startswith(":"):
            raise ValueError("only a port may follow an IPv6 address, as in [::1]:80")
        return host + bracket, _port(after[1:]) if after else None
    if text.count(":") > 1:
        return text, None
    host, colon, port_text = text.partition(":")
    return host, _port(port_text) if colon else None


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise ValueError("the port after the colon is a number from 1 to 65535")
    return int(text)


def _ascii_name(text: str) -> str:
    if text.isascii():
        return text.lower()
    import idna  # imported only for international names: its tables are large, and most files have none

    try:
        return idna.encode(text, uts46=True).decode("ascii").lower()
    except idna.IDNAError:
        raise ValueError("this international name has no valid ASCII form; write it as xn--…") from None


def _canonical_ipv4(text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise ValueError("this looks like an IPv4 address but is not one; write four numbers, as in 10.0.0.7") from None


def _canonical_ipv6(text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        raise ValueError("this is not an IPv6 address; with a port it is written in brackets, as in [::1]:80") from None
