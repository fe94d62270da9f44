"""The inspector: what the agents did, kept in memory for a page that the server itself serves (``--inspect``)."""
