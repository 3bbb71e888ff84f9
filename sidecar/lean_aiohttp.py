"""Imports aiohttp without its client: three megabytes of memory, and two TLS contexts with every root certificate.

Law: imported before anything else imports aiohttp, and only by the process itself. The sidecar uses aiohttp's server;
its own outgoing side needs nothing of the client. The package is put in place without running its `__init__`, so that
`aiohttp.web` and the rest are imported as ever, each with what it needs itself; whoever asks for a name of the client
after all gets the whole package then.
"""

from __future__ import annotations

import mimetypes
import sys
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec


def _without_client() -> None:
    spec = find_spec("aiohttp")
    assert spec is not None and spec.loader is not None
    package, loader = module_from_spec(spec), spec.loader

    def whole(name: str) -> object:
        if name.startswith("__") or find_spec(f"aiohttp.{name}") is not None:
            raise AttributeError(name)  # of a submodule: the import that asked goes on to import it
        del vars(package)["__getattr__"]
        loader.exec_module(package)
        return getattr(package, name)

    # The server names itself with its version; a module may have a `__getattr__` (PEP 562).
    vars(package).update(__version__=version("aiohttp"), __getattr__=whole)
    sys.modules["aiohttp"] = package


mimetypes.init(())  # what it knows by itself: no files are served, and the machine's list of types is long
if "aiohttp" not in sys.modules:
    _without_client()
