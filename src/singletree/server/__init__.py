"""The server: the only part that knows all the others."""
