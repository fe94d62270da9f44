"""Inference servers that already run: their requests and answers, one folder or module for each kind."""
