"""The command line's entry.

Law: imports what a command needs when it runs, so that `sidecar version` is instant. Exit codes: 0 fine, 1 failed,
2 wrong use (a bad configuration included), 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys

from sidecar.cli.parser import COMMANDS, parse


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    module, _, function = COMMANDS[chosen.command].partition(":")
    command = getattr(importlib.import_module(module), function)
    try:
        code: int = command(chosen)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130  # who pressed Ctrl-C knows; a stack would tell nothing
    except BrokenPipeError:
        # `sidecar sessions | head` has read enough. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
