"""The property: what our parsers accept, the model accepts, with the same boundaries and the same bodies.

Being stricter than RFC 9112 is allowed where it is listed here, with the reason, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.framing import rfc9112
from tests.framing.messages import Answer
from tests.framing.ours import AnswerSide, RequestSide

ONE_EACH = "HTTP/1.0"
STRICTER = {
    "method is not one": "llhttp knows a list of methods, and 501 is the answer for others (RFC 9110, 9.1)",
    "Expected HTTP/2 Connection Preface": "PRI is a method for one purpose only (RFC 9113, 3.4)",
    "is not a valid": "a Host or an authority is judged by RFC 3986, of which a model of framing knows nothing",
    "has one Host field only": "RFC 9112, 3.2: a request with another number of them is refused",
    "needs a Host field": "the same",
    "url": "a target is judged by RFC 3986 and RFC 9112, 3.2",
    "target": "the same: fragments, user names, other schemes, `*` for a method that cannot be asked about everything",
    "can only be asked about with OPTIONS": "the same",
    "no upstream has a route": "it leads nowhere",
    "only HTTP/1.1 and HTTP/1.0": "a version is judged when its first digit is read",
    "an Upgrade request cannot have a body": "servers differ in whether what follows is the body or the other protocol",
    "a CONNECT request cannot have a body": "the same",
    "Max-Forwards": "it is no number",
    ONE_EACH: "an HTTP/1.0 app gets one answer for each connection, so that the end of each can be the end of that",
}
"""What the refusal says → why it is allowed although the framing is right."""
BEHIND = "chunk extensions"
"""In this only what stands behind another request, or behind empty lines: where its body begins is not always known."""


def wrong_with_requests(side: RequestSide, segments: Iterable[bytes]) -> str | None:
    """What is wrong, or None."""
    segments = list(segments)
    data = b"".join(segments)
    ours, model = side.read(segments), rfc9112.requests(data)
    for number, asked in enumerate(ours.noted):
        if asked.refused:
            break
        if number >= len(model.messages):
            return f"request {number} was accepted: {asked.request.method} {asked.request.target!r}; the model: {model.why or model.end}"
        said = model.messages[number]
        if (said.method, said.target) != (asked.request.verb, asked.request.target):
            return f"request {number} is {said.start!r}, not {asked.request.verb!r} {asked.request.target!r}"
        if asked.whole:
            if not said.whole:
                return f"request {number} was taken for complete with {asked.body!r}; the model: {model.why}"
            if (said.body, said.trailers) != (asked.body, asked.trailers):
                return (
                    f"request {number} has {said.body!r} and {said.trailers}, not {asked.body!r} and {asked.trailers}"
                )
        elif not said.body.startswith(asked.body):
            return f"request {number} began with {said.body!r}, not with {asked.body!r}"
    accepted = sum(1 for asked in ours.noted if asked.whole and not asked.refused)
    there = sum(1 for said in model.messages if said.whole)
    behind = accepted > 0 or data[:1] in b"\r\n"
    if behind and any(BEHIND in asked.broken for asked in ours.noted):
        return None
    if accepted < there and not model.liberties and not _listed(ours.refused or (ONE_EACH if ours.over else "")):
        return f"only {accepted} of {there} requests were accepted ({ours.refused})"
    return None


def _listed(refusal: str) -> bool:
    return any(told in refusal for told in STRICTER)


def wrong_with_answers(side: AnswerSide, asked: Sequence[tuple[Answer, Sequence[bytes]]]) -> str | None:
    for number, ((method, data, ended), segments) in enumerate(asked):
        ours, model = side.ask(method, segments, ended=ended), rfc9112.answer(data, method, ended=ended)
        final = model.messages[-1] if model.messages and model.messages[-1].status >= 200 else None
        body = final.body if final is not None else b""
        if not body.startswith(ours.body):
            return f"answer {number}: the app got {ours.body!r}, the body is {body!r}"
        interims = [said.status for said in model.messages if said.status < 200]
        if ours.interims != interims[: len(ours.interims)]:
            return f"answer {number}: interim answers {interims}, not {ours.interims}"
        if ours.whole:
            if final is None or not final.whole:
                return f"answer {number} was taken for complete with {ours.body!r}; the model: {model.why or model.end}"
            if (final.status, final.body, final.trailers) != (ours.status, ours.body, ours.trailers):
                return f"answer {number} is {final}, not {ours}"
            if len(ours.interims) != len(interims):
                return f"answer {number}: interim answers {interims}, not {ours.interims}"
            if (model.end == rfc9112.SURPLUS) > ours.surplus:
                return f"answer {number}: nobody was told of {model.rest!r} behind it"
            if ours.reusable and model.end != rfc9112.CLEAN:
                return f"answer {number}: its connection would be used again; the model: {model.end}"
        elif final is not None and final.whole and not model.liberties:
            return f"answer {number} was refused ({ours.failed}); the model: {final}"
    return None
