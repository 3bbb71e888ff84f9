"""`sidecar run`: the proxy itself."""

from __future__ import annotations

import argparse
import os
import sys

from config.loader import ConfigError, load


def run(chosen: argparse.Namespace) -> int:
    try:
        loaded = load(chosen.config, os.environ)
    except ConfigError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    from sidecar import lifecycle  # not before the configuration is known to be good: it is most of the start

    return lifecycle.run(loaded)
