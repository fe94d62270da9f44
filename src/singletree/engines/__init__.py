"""Inference engines: token ids in, token ids out; and where their models come from."""
