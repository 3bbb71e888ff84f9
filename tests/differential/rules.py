"""What a proxy must change in a message (RFC 9110, 7.6; RFC 9112, 3.2), and nothing of the sidecar's own code."""

from __future__ import annotations

from http import HTTPStatus

from tests.framing.rfc9112 import Field, Message

_HOP_BY_HOP = frozenset(
    b"connection proxy-connection keep-alive te transfer-encoding content-length upgrade proxy-authorization".split()
)
_NEVER_IN_TRAILERS = frozenset(
    b"transfer-encoding content-length host connection keep-alive te upgrade trailer proxy-connection content-encoding "
    b"content-type content-range authorization proxy-authorization set-cookie cache-control max-forwards".split()
)


def passed(message: Message) -> tuple[Field, ...]:
    """The fields that belong to the message and not to this hop. Host and framing are looked at apart."""
    named = {name.strip().lower() for value in message.all(b"connection") for name in value.split(b",")}
    gone = _HOP_BY_HOP | (named - {b"host"})
    return tuple(
        (name, value)
        for name, value in message.fields
        if name.lower() not in gone and not name.lower().startswith(b"x-sidecar-")
    )


def asked_for(message: Message) -> tuple[bytes, bytes, bytes]:
    """Method, target and host of a request, as the server behind a proxy has to see them."""
    method, target = message.method, message.target
    host = b", ".join(message.all(b"host"))
    if target.lower().startswith(b"http://"):
        authority, slash, path = target[7:].partition(b"/")
        if not slash:
            authority, question, query = target[7:].partition(b"?")
            target = b"/?" + query if question else (b"*" if method == b"OPTIONS" else b"/")
        else:
            target = b"/" + path
        if b"?" in authority:
            authority, _, query = target[7:].partition(b"?")
        host = authority
    return method, target, host


def trailers(message: Message) -> tuple[Field, ...]:
    return tuple((name, value) for name, value in message.trailers if name.lower() not in _NEVER_IN_TRAILERS)


def without(fields: tuple[Field, ...], *names: bytes) -> tuple[Field, ...]:
    return tuple((name, value) for name, value in fields if name.lower() not in names)


def one_framing(message: Message) -> bool:
    """At most one of both, once."""
    return len(message.all(b"content-length")) + len(message.all(b"transfer-encoding")) <= 1


def answer_passed_on(message: Message) -> tuple[object, ...]:
    """What of an answer has to arrive."""
    fields, reason = passed(message), message.start[13:]
    if any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in reason):
        # The usual one, if there is one: nobody needs what is said there (RFC 9112, 4).
        usual = [status.phrase.encode() for status in HTTPStatus if status == message.status]
        reason = usual[0] if usual else b""
    return (message.status, reason, fields, message.body, trailers(message))


def answer_arrived(message: Message, sent: Message) -> tuple[object, ...]:
    """The same of what has arrived, without what a proxy adds."""
    assert message.start.startswith(b"HTTP/1.1 ")
    assert one_framing(message), message.fields
    via = [value for name, value in message.fields if name.lower() == b"via"]
    assert via and via[-1].startswith(b"1.1 sidecar-"), "a proxy names itself behind those that were there"
    gone = {b"connection", b"content-length", b"transfer-encoding"}
    if not any(name.lower() == b"date" for name, _ in passed(sent)):
        gone.add(b"date")
    fields = tuple(
        (name, value)
        for name, value in without(message.fields, *gone)
        if (name, value) != (b"Via", via[-1]) and not name.startswith(b"x-sidecar-")
    )
    return (message.status, message.start[13:], fields, message.body, message.trailers)
