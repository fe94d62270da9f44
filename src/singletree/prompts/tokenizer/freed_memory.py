"""Returns memory to the operating system that was needed only while a tokenizer was loaded."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return freed memory to the operating system, where the C library does not do that by itself.

    Parsing a vocabulary takes a hundred megabytes for a moment, in pieces so small that glibc keeps them.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library; TypeError on Windows
        return
    trim(0)
