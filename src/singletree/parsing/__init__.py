"""The text of a turn to events. Sans-IO, standard library only."""
