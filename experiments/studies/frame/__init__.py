"""What all studies share: searches and their cache, the page, figures, the papers' settings and figures."""
