"""The papers' tables and figures, ours beside theirs: one module a table, `python -m experiments.tables` for all."""
