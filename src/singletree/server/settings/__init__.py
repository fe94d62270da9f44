"""The settings of a server: flags, environment and file, read into one value."""
