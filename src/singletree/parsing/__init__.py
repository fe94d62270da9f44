"""Parses the text of a turn into events. Sans-IO, standard library only."""
