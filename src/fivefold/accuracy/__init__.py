"""Published, measured training runs, and how near the planner comes to them."""
