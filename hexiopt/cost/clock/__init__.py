"""The clock: when the executors of a plan end if messages share the network while they are under way."""
