"""SGLang: token ids in and out."""
