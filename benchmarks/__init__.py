"""What singletree costs, measured, beside its peers where they are installed: ``make bench``."""
