"""The dataset domain: record, shard, manifest, sample order, residency."""
