"""The wire protocols: bytes to requests, events to bytes. Sans-IO: ids and the clock are arguments."""
