"""Starts a run of any kind on all hosts: checks of its config, overrides, recipes, and the budget."""
