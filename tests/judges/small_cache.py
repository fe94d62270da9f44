"""Runs ``singletree`` with a small cache in its embedded engine, for which there is no flag.

python -m judges.small_cache serve …
"""

from __future__ import annotations

from singletree.cli import main
from singletree.llamacpp.engine import LlamaCppEngine

KV_TOKENS, CACHE_MIB = 8192, 2
"""Room for two turns at once, and for three parked conversations of 2,400 tokens of the tiny model."""

if __name__ == "__main__":
    defaults = LlamaCppEngine.__init__.__kwdefaults__
    assert defaults is not None
    defaults |= {"kv_tokens": KV_TOKENS, "cache_ram_mib": CACHE_MIB}
    main()
