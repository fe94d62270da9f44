"""Holds what the OpenAI protocols share."""
