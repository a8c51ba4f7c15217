"""Outputs of a cluster's tools, read as a cluster file whose unknown values are null."""
