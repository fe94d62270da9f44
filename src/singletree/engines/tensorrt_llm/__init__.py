"""TensorRT-LLM: a running ``trtllm-serve``, with token ids in and out."""
