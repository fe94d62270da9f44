"""vLLM and SGLang inside the server process: token ids in and out, without HTTP."""
