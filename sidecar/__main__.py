"""The command line's entry.

Law: imports what a command needs when it runs, so that `sidecar version` is instant. Exit codes: 0 fine, 1 failed,
2 wrong use (a bad configuration included), 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys

_NO_MEMORY = ("cannot allocate memory", "failed to map segment", "can't start new thread")


def main(arguments: list[str] | None = None) -> int:
    _open_what_is_closed()
    try:
        from sidecar.cli.parser import COMMANDS, parse

        chosen = parse(arguments)
        module, _, function = COMMANDS[chosen.command].partition(":")
        command = getattr(importlib.import_module(module), function)
        code: int = command(chosen)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130  # who pressed Ctrl-C knows; a stack would tell nothing
    except BrokenPipeError:
        # `sidecar sessions | head` has read enough. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, OSError, ImportError, RuntimeError) as error:
        sentence = _starved(error)
        if sentence is None:
            raise
        print(f"sidecar: {sentence}", file=sys.stderr)
        return 1


def _open_what_is_closed() -> None:
    """Started without standard streams (`2>&-`) the first files and sockets would take their numbers, and get what
    others write there."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _starved(error: BaseException) -> str | None:
    """What this machine or a limit has refused, with the way out; None for anything else."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EMFILE, errno.ENFILE):
        return (
            "no more files or sockets may be opened (ulimit -n); raise that limit to 65536: `ulimit -n`, LimitNOFILE= "
            "of systemd, or the ulimits of the container"
        )
    if isinstance(error, MemoryError) or code == errno.ENOMEM or any(word in str(error).lower() for word in _NO_MEMORY):
        return (
            "there is not enough memory to run; give it 256 MB or more: `ulimit -v`, MemoryMax= of systemd, or the "
            "memory of the container"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
