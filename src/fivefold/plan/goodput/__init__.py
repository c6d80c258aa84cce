"""Days to train with failures: how often to save, and what slow ranks cost."""
