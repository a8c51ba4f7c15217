"""Whether a problem fits, and what then: the answer of `hexiopt fit`, and what it is made of."""
