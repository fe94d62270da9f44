"""``python -m singletree``."""

from singletree.cli import main

main()
