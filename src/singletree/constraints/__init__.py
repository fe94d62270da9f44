"""Turns a family's declaration into a constraint: a grammar that an engine enforces."""
