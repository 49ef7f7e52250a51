"""The dataset domain: record, shard, manifest, sample order, residency. Knows no bucket and no torch."""
