"""The served models: how they are described, configured and loaded."""
