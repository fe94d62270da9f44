"""What the tests with many processes share."""

from __future__ import annotations

from clients.conftest import installed, tokens, workspace

__all__ = ["installed", "tokens", "workspace"]
