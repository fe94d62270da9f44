"""Drafts a family's declaration from turns whose parts are known."""
