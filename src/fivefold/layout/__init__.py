"""How a step is spread over ranks: degrees, axes, stages, shards, buckets."""
