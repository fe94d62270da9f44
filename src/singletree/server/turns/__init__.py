"""Generated turns that outlive a request: capsules that clients carry, and the stores of turns."""
