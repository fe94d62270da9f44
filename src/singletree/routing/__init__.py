"""Several engines of one model as one: which takes a turn, and turns that go on where an engine fails."""
