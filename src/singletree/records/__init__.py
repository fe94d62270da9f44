"""Records of requests: a file of them (``--trace-path``), and spans of OpenTelemetry (``--otel``)."""
