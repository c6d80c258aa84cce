"""From a job file to a trained model. `config` and `schedule` are pure; the rest needs torch."""
