"""Short trainings of a few plans, measured: what a machine makes of them, beside what they were priced at."""
