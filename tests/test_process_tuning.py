"""What the process does once for the sake of speed."""

from __future__ import annotations

import ctypes
import subprocess
import sys

from sidecar import lifecycle


def test_freed_memory_is_kept_up_to_sixteen_mebibytes(monkeypatch) -> None:
    asked: list[tuple[int, int]] = []

    class Libc:
        def mallopt(self, option: int, value: int) -> int:
            asked.append((option, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Libc())
    lifecycle._keep_freed_memory()
    assert [(-1, 16 * 1024 * 1024), (-3, 16 * 1024 * 1024)] == asked


def test_a_c_library_without_mallopt_is_no_reason_not_to_start(monkeypatch) -> None:
    def no_such_library(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_such_library)
    lifecycle._keep_freed_memory()


def test_the_process_makes_no_tls_contexts_for_a_client_it_does_not_use() -> None:
    """… and everybody else's contexts are as usual afterwards."""
    program = (
        "import ssl; usual = ssl.create_default_context\n"
        "import sidecar.lifecycle, aiohttp.connector\n"
        "made = aiohttp.connector._SSL_CONTEXT_VERIFIED\n"
        "print(made.cert_store_stats()['x509'], made.verify_mode.name, ssl.create_default_context is usual)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert ["0", "CERT_REQUIRED", "True"] == ended.stdout.split()
