"""Was anything in the write-ahead log that SQLite did not take back?

After a crash SQLite replays its log up to the first frame whose checksum is wrong, and says nothing about what
follows. A torn tail is normal: nobody was promised that. A damaged frame in the middle is not: commits behind it
are gone. Both look the same to SQLite, so the log is surveyed before it is opened and compared afterwards.

Law: reads only.
"""

from __future__ import annotations

import os
from pathlib import Path

_HEADER = 32
_FRAME_HEADER = 24


def last_commit(log: Path) -> int:
    """The number of the last frame that ends a transaction of the current generation; 0 when there is none.

    Frames of an earlier generation stay behind the end; they carry other salts. The salts are in the header and
    in every frame, so one damaged copy does not hide the rest.
    """
    try:
        with log.open("rb") as file:
            header = file.read(_HEADER)
            if len(header) < _HEADER:
                return 0
            page_size = int.from_bytes(header[8:12], "big")
            if not 512 <= page_size <= 65536:
                page_size = 4096  # a damaged header; ours are always of this size
            whole_frames = (os.fstat(file.fileno()).st_size - _HEADER) // (_FRAME_HEADER + page_size)
            generations = {header[16:24]}
            found = 0
            for number in range(whole_frames):
                file.seek(_HEADER + number * (_FRAME_HEADER + page_size))
                frame = file.read(_FRAME_HEADER)
                if number == 0:
                    generations.add(frame[8:16])
                if frame[4:8] != b"\0\0\0\0" and frame[8:16] in generations:  # the size after a commit
                    found = number + 1
            return found
    except OSError:
        return 0
