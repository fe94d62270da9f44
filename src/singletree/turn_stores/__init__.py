"""Turns that outlive a process or are shared by several: the turn memory over a store, SQLite and Redis."""
