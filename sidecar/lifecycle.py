"""Start, ready, drain, shutdown: the life of the process as commented steps.

Law: signals are turned into these steps and nothing else. The first SIGTERM or SIGINT drains, a second one ends
at once.
"""

from __future__ import annotations

import asyncio
import gc
import linecache
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from config.addresses import join_host_port
from config.loader import Loaded
from sidecar import (
    clock,
    descriptors,
    lean_aiohttp,  # noqa: F401  # before whatever else imports aiohttp
    memory,
    systemd,
)
from sidecar.assembly import CannotStart, Sidecar
from sidecar.descriptors import Inherited
from sidecar.sockets import CannotListen, GivenSockets, forget, from_service_manager
from telemetry.logs import Log
from telemetry.timestamps import rfc3339

if TYPE_CHECKING:
    from sidecar.app import App


def run(loaded: Loaded, app: App | None = None, *, takeover: bool = False) -> int:
    """Run until told to stop, or until the app has ended; the exit code, the app's if there is one. `takeover`: from
    the sidecar that owns the same `state_dir`."""
    umask = os.umask(0o077)
    memory.keep_freed()
    before = descriptors.raise_soft_limit()
    linecache.clearcache()  # the sources that models read their descriptions from
    log = Log()
    try:
        _check_room(loaded)
        given = from_service_manager(os.environ, os.getpid())
        forget(os.environ)
        return uvloop.run(_live(loaded, log, app, Inherited(umask, before), given, takeover=takeover))
    except (CannotStart, CannotListen) as why:
        log.detach()  # from a thread that would end with us, maybe before it has written this
        log.error("sidecar.cannot_start", str(why))
        return 1


def _check_room(loaded: Loaded) -> None:
    """Before there is an event loop, which would abort without."""
    settings, too_little = loaded.settings, memory.too_little()
    if too_little is not None:
        raise CannotStart(too_little)
    try:
        descriptors.of_process(1 if settings.probes is None else 2, settings.limits.admin_connections)
    except descriptors.TooFew as few:
        raise CannotStart(str(few)) from few


async def _live(
    loaded: Loaded, log: Log, app: App | None, inherited: Inherited, given: GivenSockets | None, *, takeover: bool
) -> int:
    loop = asyncio.get_running_loop()
    stop_asked = asyncio.Event()
    sidecar = Sidecar(loaded, log, environ=os.environ, given=given, takeover=takeover)
    threading.excepthook, sys.unraisablehook = sidecar.thread_fault, sidecar.unraisable_fault
    if app is None:
        sidecar.on_handed_over = stop_asked.set
    # 1. Hear signals before anyone can read "started" and send one.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_asked.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: clock.spawn(sidecar.reload("SIGHUP"), "reload"))
    # 2. Open the listeners; the admin port first, so that /readyz can already say "starting".
    await sidecar.start()
    # 3. What exists now lives as long as the process: take it out of the collector's sight.
    gc.collect()
    memory.give_back()  # parsing and building models leaves much behind that nobody will need again
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    ticker = sidecar.proxy.ticker
    ticker.every(1.0, memory.Slack(quiet=lambda: not ticker.watched).check)
    told = f"listening on {join_host_port(*sidecar.address)}, admin on {join_host_port(*sidecar.admin_address)}"
    systemd.tell(os.environ, systemd.READY, told)
    # 4. Wait for the end: of the app, which then hears the signals itself, or the one that is asked for.
    if app is not None and not stop_asked.is_set():
        return await _accompany(sidecar, app, inherited)
    await stop_asked.wait()
    # 5. Drain. A second signal ends it at once.
    grace = sidecar.proxy.settings.shutdown_grace
    told = f"finishing requests in flight for at most {grace:g} s"
    if sidecar.successor is not None:
        told = f"process {sidecar.successor} has taken the listeners over; {told}"
    log.info("sidecar.draining", told)
    systemd.tell(os.environ, systemd.STOPPING, told)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
    return 0 if await sidecar.stop() else 1


async def _accompany(sidecar: Sidecar, app: App, inherited: Inherited) -> int:
    """As long as the app lives; then its last calls are finished."""
    from sidecar.child import PASSED_ON, CannotRun, Child

    loop = asyncio.get_running_loop()
    child = Child(app.command, inherited)
    try:
        child.start(app.environment(sidecar), loop)
        code = await child.ended()
    except CannotRun as why:
        sidecar.log.error("sidecar.cannot_run", str(why))
        return why.code
    finally:
        for number in PASSED_ON:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        await sidecar.stop()
    from sidecar.run_summary import said

    state_dir = Path(sidecar.proxy.settings.state_dir)
    name = rfc3339(clock.wall())[:19].replace(":", "")
    print(f"sidecar: {said(sidecar.proxy.signals, state_dir, name)}", file=sys.stderr)
    return code
