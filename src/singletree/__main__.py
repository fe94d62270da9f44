"""Run the command line as ``python -m singletree``."""

from singletree.cli import main

main()
