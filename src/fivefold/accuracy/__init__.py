"""Published, measured training runs, and the planner's errors on them."""
