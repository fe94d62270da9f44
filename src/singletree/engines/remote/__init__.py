"""What engines on running servers share: connection, requests in flight, event streams, errors."""
