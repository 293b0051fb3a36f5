"""Pages that say what a plugin of a kind implements, made from the source that runs: ``enginebay plugins reference``."""
