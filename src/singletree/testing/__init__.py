"""Plays scripted turns instead of a model."""
