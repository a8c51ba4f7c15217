"""The parts of a plan's picture: each draws into `ax`, by default into a new figure."""
