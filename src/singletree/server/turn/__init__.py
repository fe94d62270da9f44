"""One turn: from a request to a prompt, and from the model's tokens to events."""
