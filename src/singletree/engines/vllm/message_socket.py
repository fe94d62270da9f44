"""Receives the messages of vLLM's engine at a third of the cost of pyzmq's own socket for asyncio."""

from __future__ import annotations


