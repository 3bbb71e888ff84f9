"""Imports aiohttp without the two TLS contexts that it makes for its client, each with every root certificate.

Law: imported before anything else imports aiohttp, and only by the process itself. The sidecar never uses aiohttp's
client without a context of its own, so all these would do is take a megabyte and a twentieth of a second at start.
A client that relied on them after all would find no root to trust, and fail: the safe side.
"""

from __future__ import annotations

import ssl
import sys

if "aiohttp" not in sys.modules:
    _usual = ssl.create_default_context
    ssl.create_default_context = lambda *_, **__: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        import aiohttp  # noqa: F401  # for what importing it does
    finally:
        ssl.create_default_context = _usual
