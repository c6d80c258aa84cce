"""What a layout costs: time, memory, traffic, FLOPs."""
