"""Send answers: streams, whole bodies and side events."""
