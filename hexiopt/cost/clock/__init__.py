"""The clock: when the executors of a plan end if messages share the network only while they are in transit."""
