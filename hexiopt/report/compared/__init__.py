"""Pictures and tables that compare: solvers, jobs of a sweep, choices of money and time."""
