"""`sidecar run`: the proxy itself, alone or for one command.

Law: what `--intercept` and `-- CMD` mean is said as `SIDECAR__…` variables of this process, so that a reload of the
file does not forget it; the app does not see them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from pathlib import Path

from config.addresses import parse_host_entry
from config.loader import ConfigError, Loaded, load
from config.model import Settings

_MOST_BESIDE = 100


class WrongUse(Exception):
    """Told to the person."""


def run(chosen: argparse.Namespace) -> int:
    before = dict(os.environ)
    try:
        if chosen.takeover and chosen.behind is not None:
            raise WrongUse("--takeover is for a sidecar that serves on; one that runs a command ends with it")
        if chosen.behind == []:
            raise WrongUse("there is no command behind `--`")
        loaded = load(chosen.config, os.environ)
        said = _meant(loaded, chosen.intercept, for_command=chosen.behind is not None)
        if chosen.behind is not None and loaded.origins.get("state_dir", "default") == "default":
            said |= _state_of_its_own(Path(loaded.settings.state_dir))
        if said:
            os.environ.update(said)
            loaded = load(chosen.config, os.environ)
    except (ConfigError, WrongUse) as wrong:
        print(wrong if isinstance(wrong, ConfigError) else f"sidecar run: {wrong}", file=sys.stderr)
        return 2
    from sidecar import lifecycle  # not before the configuration is known to be good: it is most of the start

    if chosen.behind is None:
        return lifecycle.run(loaded, takeover=chosen.takeover)
    from sidecar.app import App

    return lifecycle.run(loaded, App(chosen.behind, before))


def _meant(loaded: Loaded, hosts: list[str], *, for_command: bool) -> dict[str, str]:
    """The variables that say the same as the options."""
    said: dict[str, str] = {}
    for host in hosts:
        said |= _intercept(loaded.settings, host)
    if for_command:
        # Beside its app it takes whatever is free, and keeps quiet about what is well.
        for key, value in (("listen.port", "0"), ("admin.port", "0"), ("telemetry.log.level", "warn")):
            if loaded.origins.get(key, "default") == "default":
                said["SIDECAR__" + key.upper().replace(".", "__")] = value
    return said


def _state_of_its_own(usual: Path) -> dict[str, str]:
    """Two commands in one folder are two sidecars: the second one's state is beside that of the first."""
    for number in range(1, _MOST_BESIDE):
        folder = usual if number == 1 else usual.with_name(f"{usual.name}-{number}")
        try:
            if not _reserved(folder):
                continue
        except OSError:
            return {}  # it cannot be used for another reason, which the start tells
        if number == 1:
            return {}
        print(
            f"sidecar run: {usual} is in use by another sidecar, so this one keeps its state in {folder}; "
            "set `state_dir` to say where",
            file=sys.stderr,
        )
        return {"SIDECAR__STATE_DIR": str(folder)}
    return {}


def _reserved(folder: Path) -> bool:
    """Whether nobody else has it; from then on nobody else of us takes it, until this process ends."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    reservation = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(reservation, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            owner = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)  # of a sidecar that was started otherwise
        except FileNotFoundError:
            return True  # the descriptor stays open on purpose: it is the reservation
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(owner)
    except BlockingIOError:
        os.close(reservation)
        return False
    return True


def _intercept(settings: Settings, host: str) -> dict[str, str]:
    try:
        wanted = parse_host_entry(host)
    except ValueError as wrong:
        raise WrongUse(f"--intercept {host[:100]}: {wrong}") from None
    if wanted.wildcard:
        raise WrongUse(f"--intercept {host[:100]}: only hosts named one by one are intercepted; repeat the option")
    for name, upstream in settings.upstreams.items():
        if str(wanted) in upstream.hosts:
            return {f"SIDECAR__UPSTREAMS__{name}": json.dumps({"intercept": True})}
        if any(entry.startswith("*.") and wanted.host.endswith(entry[1:]) for entry in upstream.hosts):
            raise WrongUse(
                f"--intercept {host[:100]}: it belongs to upstream {name} by `*.…`; list it in the `hosts` of an "
                "upstream of its own, with `intercept: true`"
            )
    upstream_name = str(wanted).replace(":", "-").replace("[", "").replace("]", "")
    return {f"SIDECAR__UPSTREAMS__{upstream_name}": json.dumps({"hosts": [str(wanted)], "intercept": True})}
