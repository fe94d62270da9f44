"""Finds and fetches model files."""
