"""With which credential a dead letter goes out again: the sealed one, the newest seen live, or one from a variable.

Law: live credentials are in memory only, bounded, and used for the upstream they were seen on, nowhere else. When the
credential that the settings ask for is not at hand the replay is not sent: an old one would only fail again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from config.credentials import is_credential_name
from config.durable import Replay
from sidecar.durable.entry import Entry, Fields
from sidecar.durable.trouble import NotNow

_MOST = 1000
_OF_ONE_REQUEST = (b"signature", b"hmac", b"digest")
"""In the name of a credential that was made for one request, and fits no other."""


class Credentials:
    """The newest credential per upstream and caller."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], tuple[tuple[bytes, bytes], ...]] = OrderedDict()
        self._newest: dict[str, tuple[tuple[bytes, bytes], ...]] = {}

    def seen(self, upstream: str, api_key_id: str, headers: Fields) -> None:
        """A live call of this caller succeeded with these headers."""
        found = tuple((name, value) for name, value in headers if _is_lasting(name.lower()))
        if not found:
            return
        self._newest[upstream] = found
        self._seen[upstream, api_key_id] = found
        self._seen.move_to_end((upstream, api_key_id))
        if len(self._seen) > _MOST:
            (dropped, _), _ = self._seen.popitem(last=False)
            if not any(known == dropped for known, _ in self._seen):
                self._newest.pop(dropped, None)

    def headers_for(
        self, entry: Entry, headers: Fields, rules: Replay, environment: Mapping[str, str]
    ) -> list[tuple[bytes, bytes]]:
        """The entry's headers with the credential that the settings ask for. Raises NotNow."""
        if rules.credentials == "sealed":
            return list(headers)
        if rules.credentials == "environment":
            return _replaced(headers, self._from_environment(entry, rules, environment))
        live = self._seen.get((entry.upstream, entry.api_key_id))
        if live is None and rules.single_credential:
            live = self._newest.get(entry.upstream)
        if live is None:
            raise NotNow(
                f"no live call of its caller to {entry.upstream} was seen since the start, so there is no newer "
                "credential (`replay.credentials: live`); a caller is known by its credentials, so who renewed them is "
                "another one unless `idempotency.caller` names a field that stays",
                "let the application make a call, or set `replay.single_credential: true` if all callers share one",
            )
        return _replaced(headers, live)

    def _from_environment(
        self, entry: Entry, rules: Replay, environment: Mapping[str, str]
    ) -> tuple[tuple[bytes, bytes], ...]:
        missing = [name for name in rules.environment.values() if not environment.get(name)]
        if missing:
            raise NotNow(
                f"the variable {missing[0]} that `replay.environment` of {entry.upstream} names is not set",
                "set it and start the sidecar again",
            )
        return tuple((header.encode(), _value(name, environment[name])) for header, name in rules.environment.items())


def _is_lasting(name: bytes) -> bool:
    return is_credential_name(name.decode("latin-1")) and not any(word in name for word in _OF_ONE_REQUEST)


def _value(name: str, text: str) -> bytes:
    """A secret read from a file often ends with a line end, which would end the header too. Raises NotNow."""
    stripped = text.strip()
    if not stripped.isprintable():
        raise NotNow(
            f"the variable {name} holds a character that a header cannot carry, a line end perhaps",
            "set it to the value of the header alone and start the sidecar again",
        )
    return stripped.encode()


def _replaced(headers: Fields, given: tuple[tuple[bytes, bytes], ...]) -> list[tuple[bytes, bytes]]:
    """Each given header in the place of its old one; those that were not there come last."""
    left = {name.lower(): (name, value) for name, value in given}
    names = set(left)
    found = []
    for name, value in headers:
        lowered = name.lower()
        if lowered not in names:
            found.append((name, value))
        elif lowered in left:
            found.append((name, left.pop(lowered)[1]))
    return [*found, *left.values()]
