"""Published training runs: read, filled where they are silent, predicted, and compared."""
