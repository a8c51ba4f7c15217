"""Published training runs: read, completed by rules where they state nothing, predicted, and compared."""
