"""Where the sizes of chunks are, in front of a parser that reads less of their lines than RFC 9112 allows.

Law: a size line that is well formed goes on as the size alone; a recipient that does not know an extension ignores it
(7.1.1), and we know none. Nothing else is changed, judged or kept back: sizes, data, line ends and trailers are the
parser's business. The lines found here are those that the parser finds, because it gets each of them as hex digits and
CRLF and counts the same bytes from there. At the first line that is not well formed this stops for good, and so it does
behind many chunks without an extension: the parser sees all that follows as it was sent.
"""

from __future__ import annotations

import re

_BLANKS = rb"[ \t]*+"
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_QUOTED = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*+"'
_EXTENSION = rb"%b;%b%b(?:%b=%b(?:%b|%b))?+" % (_BLANKS, _BLANKS, _TOKEN, _BLANKS, _BLANKS, _TOKEN, _QUOTED)
# Nothing is tried twice: what a repetition has taken it keeps.
_EXTENDED = re.compile(rb"([0-9A-Fa-f]{1,15}+)(?:%b)++\r" % _EXTENSION)
_BEGUN = re.compile(rb"[0-9A-Fa-f]{1,15}+%b(?:;[\t -~\x80-\xff]*+)?+\r?" % _BLANKS)
_LONGEST = 4096
"""Bytes of a line that is looked at; extensions that are longer are left to the parser."""
_LINE_END = 2
_HEAD_END = b"\r\n\r\n"
_NEVER = 1 << 100
_PATIENCE = 100
"""So many chunks without an extension, one behind the other, and none is expected any more: streams of many small
chunks would pay for each of them, and who sends extensions begins with the first chunk."""


def behind_head(head: bytes, began: int) -> int | None:
    """Where what follows a head begins, which the parser has read: behind its empty line."""
    end = head.find(_HEAD_END, began)
    return None if end < 0 else end + len(_HEAD_END)


class ChunkLines:
    """Follows one body, from its first byte on."""

    __slots__ = ("_left", "_plain", "begun")

    def __init__(self) -> None:
        self._left = 0
        """Bytes up to the next size, the line end behind the data included. More than ever come behind the last size,
        and behind what was not understood."""
        self._plain = 0
        """Chunks since the last extension."""
        self.begun = b""
        """A size line whose end has not come. The parser has none of it."""

    def follow(self, data: bytes, at: int = 0) -> bytes:
        """What the parser is to be fed instead of `data[at:]`."""
        if self.begun:
            data, at, self.begun = self.begun + data[at:], 0, b""
        parts: list[bytes] = []
        size, since, plain = len(data), at, self._plain
        at += self._left
        while at < size:
            end = data.find(b"\n", at)
            if end < 0:
                if size - at <= _LONGEST and _BEGUN.fullmatch(data, at):
                    self.begun = data[at:]
                    size = at
                else:
                    at = _NEVER
                break
            line = data[at:end]
            try:
                # Python reads more than hex digits as a number, and the parser refuses all of that.
                length = int(line, 16)
                plain += 1
            except ValueError:
                extended = _EXTENDED.fullmatch(line) if len(line) < _LONGEST else None
                if extended is None:
                    at = _NEVER
                    break
                parts += (data[since:at], extended[1], b"\r\n")
                since, plain = end + 1, 0
                length = int(extended[1], 16)
            at = end + 1 + length + _LINE_END if length > 0 and plain < _PATIENCE else _NEVER
        self._left, self._plain = at - size, plain
        rest = data[since:size]
        return b"".join((*parts, rest)) if parts else rest
