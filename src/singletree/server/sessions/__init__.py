"""Recognise sessions, and explain where their prompts diverge."""

PATH = "/v1/singletree/sessions"
