"""Tests with real sockets, on loopback."""
