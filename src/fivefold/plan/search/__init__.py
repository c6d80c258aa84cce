"""All layouts, pruned by closed forms and timed by their schedules."""
