"""The exact tokens of sessions, kept while they are served: capture, graph of a session, check, forms for trainers."""
