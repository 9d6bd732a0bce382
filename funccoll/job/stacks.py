"""The stacks of this process's threads as text, for ranks that wait for it."""

from __future__ import annotations

import sys
import threading
import traceback

__all__ = ["stacks"]

_FRAMES = 12  # of each thread, its innermost


def stacks() -> str:
    """The stacks of all threads but the calling one, the main thread's first."""
    frames, mine = sys._current_frames(), threading.get_ident()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if thread.ident != mine and frame is not None:
            lines = traceback.format_list(traceback.extract_stack(frame)[-_FRAMES:])
            parts.append(f"thread {thread.name}:\n{''.join(lines).rstrip()}")
    return "\n".join(parts)
