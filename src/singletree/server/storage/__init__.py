"""Store responses and conversations."""
