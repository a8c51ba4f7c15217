"""What the tools of a cluster print about it, read as a cluster file whose unknowns are null."""
