"""Engines on inference servers that already run, at ``--engine-url``; one folder or module for each kind of server."""
