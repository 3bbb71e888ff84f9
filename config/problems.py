"""A mistake in the configuration, as a person is told about it.

A problem says where (file and line, or environment variable), which key, what is wrong, what to do, and shows
the value, shortened. The value of anything that looks like a secret is never shown, not even in part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from config.checks import KeyPath
from config.credentials import has_credential_shape, is_credential_name

_HIDDEN = "(hidden)"
_LONGEST_VALUE = 60
_SECRET_KEYS = frozenset({"egress_proxy", "notify_url"})  # addresses with a password or a secret path, often
_UNKNOWN_SECRET_KEY = re.compile(r"key$|pass|pwd|pin$|sign", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"-----BEGIN"  # PEM
    r"|^(basic|bearer|digest|negotiate|token|apikey)\s"  # an Authorization header
    r"|^(scrypt|pbkdf2)[:$]"  # the hash of a password
    r"|^eyJ[\w-]+\.|^(sk|pk|rk|ghp|gho|xox[a-z]|AKIA|AIza)[_-]?\w{8,}",  # tokens of well-known providers
    re.IGNORECASE,
)
_PAIR = re.compile(r"(?<![\w-])([\w-]++)\s*+[=:]")  # `name=value`, in a query or alone
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}+://[^/?#\s]*+)[/?#]\S++")
_OPAQUE = re.compile(r"[A-Za-z0-9+=_-]{24,}")  # no dots or slashes

_NEEDS_QUOTES = re.compile(
    r"|[+-]?[0-9]+(\.[0-9]*)?|true|false|yes|no|on|off|null|~", re.IGNORECASE
)  # else read as another type


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `value` is already shortened, and masked where needed."""

    message: str
    key: str = ""
    """Dotted; empty when the file as a whole is meant."""
    file: str | None = None
    line: int | None = None
    """From 1, like `column`."""
    column: int | None = None
    variable: str | None = None
    """The environment variable, when the value came from one."""
    value: str | None = None
    nearest: str | None = None
    """The valid key, name or choice that was probably meant."""

    def __str__(self) -> str:
        if self.variable is not None:
            parts = [f"environment variable {self.variable}"]
        elif self.file is not None:
            parts = [self.file if self.line is None else f"{self.file}:{self.line}"]
        else:
            parts = []
        if self.key:
            parts.append(self.key)
        suggestion = f'; did you mean "{self.nearest}"?' if self.nearest else ""
        shown = f" (value: {self.value})" if self.value is not None else ""
        parts.append(f"{self.message}{suggestion}{shown}")
        return ": ".join(parts)


class ConfigError(Exception):
    """The configuration cannot be used. Holds every problem found, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=_reading_order))
        super().__init__(*self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def dotted(path: KeyPath) -> str:
    """`("upstreams", "a", "hosts", 0)` as `upstreams.a.hosts[0]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def shown_value(path: KeyPath, value: object, *, known_key: bool = True) -> str | None:
    """The value as it may be printed: short, on one line, secrets hidden; None when there is nothing to
    show."""
    if isinstance(value, dict):
        return None  # its keys have lines of their own
    names = [part for part in path if isinstance(part, str)]
    if any(name in _SECRET_KEYS or (is_credential_name(name) and _is_no_place(name)) for name in names):
        return _HIDDEN
    if not known_key and names and _UNKNOWN_SECRET_KEY.search(names[-1]):
        return _HIDDEN
    return _shortened(_text_of(value))


def _is_no_place(name: str) -> bool:
    """`token_file` and `tls.key` say where the secret is, `code` what a rule gives."""
    return not name.endswith("_file") and name not in ("code", "key")


def _is_secret(text: str) -> bool:
    if _SECRET_VALUE.search(text) or _looks_random(text) or has_credential_shape(text):
        return True
    if "@" in text and (":" in text[: text.rindex("@")]):  # user and password, even in a url that is written wrongly
        return True
    return any(is_credential_name(found[1]) for found in _PAIR.finditer(text))


def _looks_random(text: str) -> bool:
    """Something long without a break, and from there on letters and digits."""
    long = _OPAQUE.search(text)
    rest = "" if long is None else text[long.start() :]
    return any(map(str.isdecimal, rest)) and any(map(str.isalpha, rest))


def _text_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if _is_secret(value):
            return _HIDDEN
        return f'"{value}"' if _NEEDS_QUOTES.fullmatch(value) else _ADDRESS.sub(r"\1/…", value)
    if isinstance(value, (list, tuple)):
        shown = [_text_of(item) if not isinstance(item, (dict, list, tuple)) else "…" for item in value[:4]]
        return f"[{', '.join(shown)}{', …' if len(value) > 4 else ''}]"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very large number"  # Python refuses to print numbers of thousands of digits
    return str(value)


def _shortened(text: str) -> str:
    one_line = "".join(character if character.isprintable() else " " for character in text)
    return one_line if len(one_line) <= _LONGEST_VALUE else one_line[: _LONGEST_VALUE - 1] + "…"


def _reading_order(problem: Problem) -> tuple[bool, int, int, str, str]:
    return (
        problem.variable is not None,
        problem.line or 0,
        problem.column or 0,
        problem.variable or "",
        problem.key,
    )
