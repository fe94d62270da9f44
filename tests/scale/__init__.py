"""Tests that start the processes of a whole installation: `make scale`."""
