"""Plans a run for `config.budget`: chooses its sizes and its number of steps, so that the run takes its budget.

`choice` computes the sizes of a model and its training from a text, a machine and a budget; it reads no files. `survey`
reads at most 64 MB of a corpus. `machine` measures the speed of matrix products. `steps` measures training steps and
computes their number. `plan` uses these modules: before the text is prepared, it chooses the sizes (only for configs
with a `recipe`), and before training, it sets the number of steps. It stores the numbers in the workdir, in `plan.json`
and in the config. `description` formats the plan.
"""
