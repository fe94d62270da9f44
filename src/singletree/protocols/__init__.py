"""The wire protocols: decode bytes into requests, encode events as bytes. Sans-IO: ids and the clock are arguments."""
