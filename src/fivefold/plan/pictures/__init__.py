"""Pictures of a plan: memory, time, traffic, and where its ranks are."""
