"""Run a learner's code so that it always comes back: works in any thread and on any operating system."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

STACK_BYTES = 16 * 2**20  # secondary threads get 512 KB on macOS, and a runaway recursion there would kill the kernel


class TimeLimit(BaseException):
    """The time is up. Not an Exception, so that a learner's `except Exception` does not swallow it."""


def call_with_limit(function: Callable[[], Any], seconds: float) -> Any:
    """Return `function()`, computed in a thread that is stopped after `seconds`.

    On a busy machine the time counts only once as much has been computed, up to four times as long, so that a right
    answer does not fail for lack of a processor.

    A thread rather than an alarm signal: it behaves the same on Windows, outside the main thread, and where
    the learner's code swallows every exception or sleeps in C. Such code is left behind as a daemon thread.

    Raises:
        TimeLimit: If the time is up. Whatever `function` itself raises is passed on.
    """
    result: dict[str, Any] = {}

    def work() -> None:
        with contextlib.suppress(TimeLimit):  # one that arrives while the result is being stored
            try:
                result["value"] = function()
            except BaseException as error:  # SystemExit too: a learner's sys.exit() must not end the kernel
                result["error"] = error

    previous = threading.stack_size(STACK_BYTES)
    try:
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
    finally:
        threading.stack_size(previous)
    try:
        clock, computed = time.monotonic(), time.process_time()
        worker.join(seconds)
        while worker.is_alive() and time.process_time() - computed < seconds and time.monotonic() - clock < 4 * seconds:
            worker.join(seconds / 20)
    finally:  # also when the learner interrupts the kernel while waiting
        late = worker.is_alive()
        if late:
            _stop(worker)
    if late or isinstance(result.get("error"), TimeLimit):
        raise TimeLimit
    if "error" in result:
        raise result["error"]
    return result["value"]


def _stop(worker: threading.Thread, patience: float = 1.0) -> None:
    """Raise TimeLimit inside `worker` until it ends; a bare `except:` may swallow a few."""
    deadline = time.monotonic() + patience
    while worker.is_alive() and time.monotonic() < deadline:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(TimeLimit))
        worker.join(0.05)
