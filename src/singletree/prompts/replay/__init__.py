"""Puts the tokens of generated turns back into a prompt."""
