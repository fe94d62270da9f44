"""Send answers: streams, whole bodies, background jobs and side events."""
