"""Benchmarks: ratios of medians, ours and the reference alternating in one run."""
