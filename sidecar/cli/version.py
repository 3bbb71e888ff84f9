"""`sidecar version`."""

from __future__ import annotations

import argparse

from sidecar import __version__


def version(chosen: argparse.Namespace) -> int:
    print(f'{{"version": "{__version__}"}}' if chosen.json else f"sidecar {__version__}")
    return 0
