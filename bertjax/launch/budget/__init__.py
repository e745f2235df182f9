"""Plans a run for `config.budget`."""
