"""Engines of one model used as one: a turn outlives its engine, and policies choose an engine."""
