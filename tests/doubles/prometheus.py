"""A real Prometheus on a free port, and promtool. Both come with Debian's package `prometheus`.

Where the package is missing a test that needs it is skipped with a line that says what was not run and why.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# Straight to the address, whatever proxy the environment names.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where there is none."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/bin", "/usr/local/bin"]))
    if found is None:
        pytest.skip(
            f"not run: {name} is not installed. Debian and Ubuntu have it in the package `prometheus`: "
            "apt-get install prometheus"
        )
    return found


def promtool(*arguments: str | Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("promtool"), *map(str, arguments)], input=given, capture_output=True, text=True, check=False
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait until `condition` gives something; its last answer, or a failure that names what was waited for."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:g} s for {what}")
        time.sleep(0.1)


@dataclass
class Series:
    """One series of an answer: its labels and (time, value) pairs."""

    labels: dict[str, str]
    points: list[tuple[float, float]] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    @property
    def artefacts(self) -> list[float]:
        """What a panel would show as NaN or ∞."""
        return [value for value in self.values if not math.isfinite(value)]


def named(legend: str, series: Series) -> str:
    """A series as Grafana calls it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: series.labels.get(found[1], ""), legend)


class Prometheus:
    """A running server. `targets` are job → addresses; `pages` is served under /consoles."""

    def __init__(
        self,
        folder: Path,
        *,
        targets: dict[str, Iterable[str]] | None = None,
        rules: Path | None = None,
        pages: Path | None = None,
        interval: str = "1s",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._data = folder / "data"
        config: dict[str, Any] = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval, "scrape_timeout": "900ms"},
            "rule_files": [str(rules)] if rules else [],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(addresses)}]}
                for job, addresses in (targets or {}).items()
            ],
        }
        if interval != "1s":
            del config["global"]["scrape_timeout"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._log = (folder / "prometheus.log").open("w+")
        command = [
            tool("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._data}",
            "--storage.tsdb.retention.time=30d",
            f"--web.listen-address=127.0.0.1:{self.port}",
            f"--web.external-url={self.url}",
            "--enable-feature=exemplar-storage",
        ]
        if pages is not None:
            command.append(f"--web.console.templates={pages}")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        until(self._ready, 20, "Prometheus to be ready")

    def _ready(self) -> bool:
        if self._process.poll() is not None:
            self._log.seek(0)
            pytest.fail(f"Prometheus ended with {self._process.returncode}:\n{self._log.read()}")
        try:
            return self.get("/-/ready")[0] == 200
        except OSError:
            return False

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with OPENER.open(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def _api(self, path: str, **asked: object) -> Any:
        status, text = self.get(f"/api/v1/{path}?" + urllib.parse.urlencode(asked))
        answer = json.loads(text)
        assert answer["status"] == "success", f"{asked}: {status} {answer.get('error', text)}"
        return answer["data"]

    def now(self, expr: str, at: float | None = None) -> list[Series]:
        """An instant query."""
        asked: dict[str, object] = {"query": expr} if at is None else {"query": expr, "time": at}
        result = self._api("query", **asked)
        if result["resultType"] == "scalar":
            return [Series({}, [(result["result"][0], float(result["result"][1]))])]
        return [Series(each["metric"], [(each["value"][0], float(each["value"][1]))]) for each in result["result"]]

    def over(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """A range query."""
        result = self._api("query_range", query=expr, start=start, end=end, step=step)
        return [
            Series(each["metric"], [(at, float(value)) for at, value in each["values"]]) for each in result["result"]
        ]

    def exemplars(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._api("query_exemplars", query=expr, start=start, end=end)
        return found

    def alerts(self) -> list[dict[str, Any]]:
        """Pending and firing ones, with their labels and annotations as they are now."""
        found: list[dict[str, Any]] = self._api("alerts")["alerts"]
        return found

    def targets_up(self) -> int:
        return sum(target["health"] == "up" for target in self._api("targets")["activeTargets"])
