"""Budgets of sessions, sub-agents and API keys: requests are refused once what they count for has cost too much."""
