"""Reads the arguments of tool calls as they arrive, and converts them to JSON text."""
