"""Stored responses and conversations of the Responses API: their routes, and the store in a database."""
