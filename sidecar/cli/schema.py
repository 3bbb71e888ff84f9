"""`sidecar schema`: the JSON Schema of the configuration file, for editors."""

from __future__ import annotations

import argparse
import json

from config.schema import json_schema


def schema(chosen: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0
