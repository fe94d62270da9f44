"""llama.cpp: its wire, ``llama-server``, and the embedded engine in a child process with slots and saved prefixes."""
