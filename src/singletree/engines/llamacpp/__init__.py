"""Runs llama.cpp in a child process."""
