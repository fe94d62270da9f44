"""What SGLang loads instead of its own models: ``SGLANG_EXTERNAL_MODEL_PACKAGE=engines.sglang_models``."""
