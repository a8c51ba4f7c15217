"""The page of `hexiopt page`: a form, a search in a process of its own, and our report, on this machine alone."""
