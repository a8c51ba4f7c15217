"""How good is the order of operations of a pipeline? Small pipelines by our clock, beside their optimal schedules."""
