"""Responses over a WebSocket: the connection, and the answers on it."""
