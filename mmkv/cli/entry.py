"""The entry point of the ``mmkv`` command: a fast start, and a fast end.

Only here, never where the command line is called from other code: the process ends at once when
everything is written, and the garbage collector stays off while modules are imported.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading

from mmkv.engine.interrupts import quiet_imports


def entry() -> None:
    """Run the command line and end the process with its exit code."""
    let_idle_threads_sleep()
    if sys.argv[1:2] == ["chat"]:
        # Importing makes objects by the hundred thousand, and no garbage; mmkv.loading switches
        # the collector on again when the model is loaded.
        gc.disable()
    with quiet_imports():
        from mmkv.cli.app import run

    leave(run())


def let_idle_threads_sleep() -> None:
    """Have torch's threads sleep when they wait; to be called before torch is imported.

    A team of threads that spins when it has nothing to do (GOMP: for milliseconds) takes the cores
    from others, and then waits for them. This one sleeps after some 50 us.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def leave(code: int) -> None:
    """End the process; skip the interpreter's teardown, which takes longer than a short answer.

    What is registered with atexit runs and both streams are flushed first. The usual way is taken
    where a profiler or debugger watches, a thread still works, or a stream cannot be flushed.
    """
    watched = sys.gettrace() or sys.getprofile() or "coverage" in sys.modules or sys.flags.inspect
    main = threading.main_thread()
    if watched or any(t is not main and not t.daemon for t in threading.enumerate()):
        sys.exit(code)
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code)
