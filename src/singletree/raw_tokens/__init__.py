"""Prompts as text or token ids: completions, token ids in and out as vLLM has them, text to tokens and back."""
