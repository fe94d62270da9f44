"""Recognise sessions, and explain where their prompts diverge."""
