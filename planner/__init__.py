"""Should this be distributed, how, on how many nodes, at what cost."""
