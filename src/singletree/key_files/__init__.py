"""API keys in a file: with names, rights and rates, stored as digests, and read again when the file changes."""
