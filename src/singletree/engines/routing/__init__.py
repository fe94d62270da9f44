"""Routing: several engines of one model are used as one."""
