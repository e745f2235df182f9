"""Plans a run for `config.budget`: chooses its sizes and its number of steps, so that the run takes its budget.

`choice` computes the sizes of a model and of its training for a text, a machine and a budget, without reading files.
`survey` reads at most 64 MB of a corpus. `machine` measures the speed of matrix products. `steps` measures the time of
training steps, and computes the number of steps. `plan` uses these modules. Before the text is prepared, `plan` chooses
the sizes, but only for a config with a `recipe`. Before training, `plan` sets the number of steps. `plan` stores these
numbers in the config and in `plan.json` in the workdir. `description` formats the plan.
"""
