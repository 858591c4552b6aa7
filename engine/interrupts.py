"""Holds a Ctrl-C back while something must not stop half-way. No jax."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Holds a Ctrl-C back until the block is done.

    In between, donated arrays are gone and sampled tokens not booked yet.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # None: a handler that Python did not set, and could not set again.
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came: list[tuple[int, Any]] = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and callable(before):
            before(*came[0])
