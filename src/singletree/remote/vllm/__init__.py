"""Drives a running vLLM server over HTTP."""
