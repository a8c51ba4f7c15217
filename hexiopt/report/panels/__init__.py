"""The parts of a plan's picture: each draws into `ax`, or into a new figure where `ax` is None."""
