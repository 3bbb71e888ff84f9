"""A parent proxy that an upstream's traffic goes through, and how it is written: `http://[user:password@]host:port`.

Law: the password can be used but not seen. Whatever prints a proxy shows `REDACTED` in its place.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from config.addresses import canonical_host, join_host_port

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:(?P<user>[^/?#]*)@)?(?P<address>[^/?#@]*)(?P<rest>.*)")
_ADDRESS = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*):(?P<port>[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class EgressProxy:
    """Where the proxy is reached, and with which credentials."""

    host: str
    port: int
    credentials: str | None = field(default=None, repr=False)
    """`user:password`, decoded."""

    def __str__(self) -> str:
        shown = "REDACTED:REDACTED@" if self.credentials is not None else ""
        return f"http://{shown}{self.label}"

    @property
    def label(self) -> str:
        """`host:port`, without credentials: for records and metrics."""
        return join_host_port(self.host, self.port)

    @property
    def authorization(self) -> str | None:
        """The value of Proxy-Authorization, if the proxy asks for a user."""
        if self.credentials is None:
            return None
        return "Basic " + base64.b64encode(self.credentials.encode()).decode("ascii")


def parse_egress_proxy(given: Any) -> EgressProxy:
    """Take a proxy's url apart; raises ValueError with what to write instead, never repeating the text."""
    if isinstance(given, EgressProxy):
        return given
    match = _URL.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise ValueError("a proxy is written as http://host:port, as in http://proxy.corp:3128")
    if match["scheme"].lower() != "http":
        raise ValueError(
            "a proxy is spoken to in plain http: http://host:port (https targets pass through it by CONNECT)"
        )
    if match["rest"] not in ("", "/"):
        raise ValueError("a proxy has no path or query; end it after the port")
    address = _ADDRESS.fullmatch(match["address"])
    if address is None or not 1 <= int(address["port"]) <= 65535:
        raise ValueError("a proxy needs its port, a number from 1 to 65535: http://host:port")
    return EgressProxy(canonical_host(address["host"]), int(address["port"]), _credentials(match["user"]))


def _credentials(text: str | None) -> str | None:
    if text is None:
        return None
    user, colon, password = text.partition(":")
    if not user or not colon:
        raise ValueError("write user and password as http://user:password@host:port, special characters as %40")
    if "@" in password:
        raise ValueError("an `@` in the password is written as %40")
    decoded = f"{unquote(user)}:{unquote(password)}"
    if ":" in unquote(user) or not decoded.isprintable():
        raise ValueError("the user may not contain a colon, and neither part a control character")
    return decoded


ProxyUrl = Annotated[
    EgressProxy,
    PlainValidator(parse_egress_proxy),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^[hH][tT][tT][pP]://[^/?#]+:[0-9]+/?$"}),
]
