"""The contract of an endpoint that serves agents, as checks that run against any server: ``singletree check``."""
