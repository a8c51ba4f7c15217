"""What all studies share: searches and their cache, pages, pictures, and the settings and figures of the papers."""
