"""The files of the corpus. How they are written is in the README beside this file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_HEADERS = {
    "requests": frozenset({"expect"}),
    "responses": frozenset({"expect", "asked", "then"}),
}
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|\{(\d+)\*([^}]+)\}|(.))")
_SIMPLE = {b"r": b"\r", b"n": b"\n", b"t": b"\t", b"0": b"\0", b"\\": b"\\", b"s": b" "}
_CUT = b"\\|"


@dataclass(frozen=True)
class Case:
    name: str
    why: str
    headers: dict[str, str]
    segments: tuple[bytes, ...]

    @property
    def data(self) -> bytes:
        return b"".join(self.segments)

    @property
    def expected(self) -> list[str]:
        return [word.strip() for word in self.headers["expect"].split(",")]


def cases(kind: str) -> list[Case]:
    """`requests` or `responses`, by name."""
    return [_read(path, kind) for path in sorted((FOLDER / kind).glob("*.http"))]


def _read(path: Path, kind: str) -> Case:
    head, _, message = path.read_bytes().partition(b"---\n")
    lines = head.decode("ascii").splitlines()
    why = " ".join(line[2:] for line in lines if line.startswith("# "))
    pairs = (line.partition(": ") for line in lines if not line.startswith("#"))
    headers = {name: value for name, _, value in pairs}
    assert "expect" in headers and headers.keys() <= _HEADERS[kind], f"{path.name}: its header lines are {lines}"
    return Case(path.stem, why, headers, tuple(map(_unescaped, _wire(message).split(_CUT))))


def _wire(message: bytes) -> bytes:
    """Every line ends with CRLF, but for those that end with a backslash."""
    found = []
    for line in message.split(b"\n")[:-1]:
        ends_with_escape = len(line) - len(line.rstrip(b"\\"))
        found.append(line[:-1] if ends_with_escape % 2 else line + b"\\r\\n")
    return b"".join(found)


def _unescaped(text: bytes) -> bytes:
    def meant(found: re.Match[bytes]) -> bytes:
        byte, count, repeated, simple = found.groups()
        if byte is not None:
            return bytes([int(byte, 16)])
        return _unescaped(repeated) * int(count) if count is not None else _SIMPLE[simple]

    return _ESCAPE.sub(meant, text)
