"""A conversation becomes token ids here, and token ids become text."""
