"""Render conversations with the checkpoint's chat template."""
