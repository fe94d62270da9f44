"""One server in several processes: the parent, what each child serves, and what they ask one another."""
