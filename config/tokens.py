"""The file `admin.token_file` names: who may ask the admin port, and what for.

One token per line, `NAME ROLE sha256:DIGEST`; empty lines and those that begin with `#` say nothing. The file holds
digests, so reading it opens nothing; but who may write to it may let himself in, which is why its mode is looked at.
A token is 256 random bits, so a plain digest is enough: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from config.checks import Contradiction
from config.files import UnreadableFile, read_file
from config.keys import nearest
from config.model import Settings

Role = Literal["read", "operate"]
ROLES: tuple[Role, ...] = get_args(Role)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,62}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LARGEST_FILE = 1024 * 1024
_OTHERS_MAY_WRITE = 0o022
_MARK = "sidecar_"
_MAKE = "`sidecar tokens new NAME --role ROLE --file FILE` writes one"


class WrongTokens(Exception):
    """A file of tokens that cannot be used; the message names the line and what to write."""


class Token(NamedTuple):
    """One line."""

    name: str
    role: Role
    digest: str

    def __str__(self) -> str:
        return f"{self.name} {self.role} {self.digest}"


def digest_of(token: str) -> str:
    return "sha256:" + hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def new_token() -> str:
    """For its owner; it is written down nowhere."""
    return _MARK + secrets.token_urlsafe(32)


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Every token of the file. WrongTokens says what is wrong with it."""
    try:
        text = read_file(path, _LARGEST_FILE).decode()
        mode = path.stat().st_mode
    except UnreadableFile as unreadable:
        raise WrongTokens(str(unreadable)) from None
    except OSError as error:
        raise WrongTokens(f"the file cannot be looked at: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WrongTokens("the file is not UTF-8 text; is it the right one?") from None
    if mode & _OTHERS_MAY_WRITE:
        raise WrongTokens("others may write to the file, and so let themselves in; take that away: `chmod go-w`")
    found = parse_tokens(text.splitlines())
    if not found:
        raise WrongTokens(f"the file holds no token, so nobody could ask; {_MAKE}")
    return found


def token_problems(settings: Settings) -> Iterator[Contradiction]:
    """Why the file of tokens cannot do its work."""
    path = settings.admin.token_file
    if path is None:
        return
    try:
        read_tokens(path)
    except WrongTokens as wrong:
        key = ("admin", "token_file")
        yield Contradiction(key, str(wrong), (key,))


def parse_tokens(lines: Iterable[str]) -> tuple[Token, ...]:
    found: dict[str, Token] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        token = _parsed(words, number)
        if token.name in found:
            raise WrongTokens(f"line {number}: {token.name} is there twice; a name has one token")
        if any(token.digest == other.digest for other in found.values()):
            raise WrongTokens(f"line {number}: {token.name} has the token of another name; {_MAKE}")
        found[token.name] = token
    return tuple(found.values())


def wrong_name(name: str) -> str | None:
    """Why a token cannot be called so, or None."""
    if _NAME.fullmatch(name):
        return None
    return "a name has 1 to 63 letters, digits, `.`, `_`, `@` or `-`, and begins with a letter or digit"


def _parsed(words: list[str], number: int) -> Token:
    """Never repeats what it refuses: that may be a token in clear."""
    if len(words) != 3:
        raise WrongTokens(f"line {number}: write NAME ROLE sha256:DIGEST; {_MAKE}")
    name, role, digest = words
    refused = wrong_name(name)
    if refused is not None:
        raise WrongTokens(f"line {number}: {refused}")
    if role not in ROLES:
        near = nearest(role, ROLES)
        hint = f'; did you mean "{near}"?' if near is not None else ""
        raise WrongTokens(f"line {number}: the role of {name} is one of {', '.join(ROLES)}{hint}")
    if not _DIGEST.fullmatch(digest):
        raise WrongTokens(
            f"line {number}: the third word is sha256: and 64 hexadecimal digits, never the token itself; {_MAKE}"
        )
    return Token(name, "operate" if role == "operate" else "read", digest)
