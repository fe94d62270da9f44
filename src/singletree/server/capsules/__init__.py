"""Capsules: the tokens of generated turns, encrypted, which clients carry and stores keep."""
