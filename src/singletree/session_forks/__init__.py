"""Sessions that go on in another model: from one of their turns, or from now on."""
