"""Routing by prefix: which of several engines has to read the fewest tokens."""
