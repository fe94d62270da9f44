"""Serve HTTP: the application, its routes, the WebSocket and the process."""
