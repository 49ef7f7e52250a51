"""Everything inside and around `torchrun`: workload, loader, loop, checkpoint, evaluation."""
