"""The pictures and documents of a request: fetched, checked, and made ready for the model."""
