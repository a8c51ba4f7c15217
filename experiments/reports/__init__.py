"""Reports of what was run: trained, measured beside the prediction, emulated, and validated against published runs."""
