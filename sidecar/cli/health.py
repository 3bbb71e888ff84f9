"""`sidecar health`: is the sidecar ready? For HEALTHCHECK of a container image, where no curl is.

Law: asks `probes` if there is such a listener, else the admin port; in a container also where the configuration that
process 1 was started with says. Shows no token, so it trusts whatever certificate it is shown.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path

from sidecar.cli.admin import VARIABLE, Address, Failed, configured, find_address, on_this_machine, telling_failures

_PATIENCE = 2.0
FIRST_PROCESS = Path("/proc/1/cmdline")


@telling_failures
def health(chosen: argparse.Namespace) -> int:
    if chosen.config is None and not os.environ.get("SIDECAR_CONFIG"):
        chosen.config = config_of(FIRST_PROCESS)
    address = _probes(chosen, os.environ) or find_address(chosen, os.environ)
    status, told = _asked(address)
    if status == 401:
        shown = ("answers", "it answers; whether it is ready it tells without a token only on `probes`")
    elif status == 200 and told.get("status") == "ready":
        shown = ("ready", "ready")
    elif "reason" in told:
        raise Failed(f"not ready: {told.get('store') or told['reason']}")
    else:
        raise Failed(f"what answers at {address.url} ({address.named_by}) is not a sidecar: it says {status}")
    if isinstance(told.get("store"), str):
        print(f"sidecar health: the store is {told['store']}", file=sys.stderr)
    configuration = told.get("configuration")
    if isinstance(configuration, dict) and configuration.get("refused"):
        print(f"sidecar health: runs on an earlier configuration: {configuration['refused']}", file=sys.stderr)
    print(json.dumps({"status": shown[0]}) if chosen.json else shown[1])
    return 0


def config_of(process: Path) -> Path | None:
    """The file that a `sidecar run -c FILE` was given, also one behind an init. None if the process is another."""
    try:
        words = process.read_bytes().decode().split("\0")
    except (OSError, UnicodeDecodeError):
        return None
    if "run" not in words or not any(Path(word).name == "sidecar" for word in words):
        return None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("-c", "--config"):
            return Path(following)
        if word.startswith("--config="):
            return Path(word.partition("=")[2])
    return None


def _probes(chosen: argparse.Namespace, environ: Mapping[str, str]) -> Address | None:
    """The listener for probes, which asks for no token."""
    named = any(name == "SIDECAR_CONFIG" or name.upper().startswith("SIDECAR__PROBES") for name in environ)
    if chosen.admin is not None or environ.get(VARIABLE) or not (named or chosen.config is not None):
        return None
    probes = configured(chosen.config, environ)[0].probes
    return None if probes is None or probes.port == 0 else Address(on_this_machine(probes.host), probes.port, "probes")


def _asked(address: Address) -> tuple[int, Mapping[str, object]]:
    if address.scheme == "https":
        tls = ssl.create_default_context()
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            address.host, address.port, timeout=_PATIENCE, context=tls
        )
    else:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=_PATIENCE)
    try:
        connection.request("GET", "/readyz", headers={"Connection": "close"})
        response = connection.getresponse()
        told = json.loads(response.read(65536))
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Failed(f"nothing answers at {address.url} ({address.named_by}): {why}") from None
    except ValueError:
        return response.status, {}
    finally:
        connection.close()
    return response.status, told if isinstance(told, dict) else {}
