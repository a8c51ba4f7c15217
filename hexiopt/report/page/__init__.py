"""The page of a plan, `report.html`: its text, its timeline as SVG, and its one script."""
