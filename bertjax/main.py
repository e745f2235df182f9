"""Trains BERT: python -m bertjax.main --config=experiments/quickstart.py

The config says everything; --config.x.y=VALUE overrides a field. Records and vocabulary are prepared from the corpus
where the config names none. The same command goes on where it stopped.
"""

import functools
import os

from absl import flags

from bertjax import command

_CONFIG = command.define_config_flag()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/NAME-OF-THE-EXPERIMENT.")
flags.mark_flag_as_required("config")


def main(arguments: list[str]) -> None:
    from bertjax.config import UserError, validate

    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; settings are given as --config.name=value")
    validate(_CONFIG.value)
    run(_CONFIG.value, _WORKDIR.value or f"runs/{command.experiment_name()}")


def run(config, workdir: str) -> None:
    """Trains what a validated config says in `workdir`, and prints the held-out scores. Finished: says so at once."""
    import jax
    from etils import epath

    from bertjax.config import total_steps
    from bertjax.sharding import hosts
    from bertjax.sharding.mesh import local_copy, make_mesh, use_cpu_cores
    from bertjax.training import checkpoint, run_folder

    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/bertjax/compiled"))
    jax.config.update("jax_compilation_cache_dir", cache)
    is_first = hosts.join(config.hosts_timeout) == 0
    use_cpu_cores(config)
    workdir, initialize = epath.Path(workdir), None
    run_folder.check_shared(workdir)
    if config.init_checkpoint:
        from bertjax.interop import pretrained

        if checkpoint.steps(workdir):  # begun already: what it was begun from may be gone
            run_folder.adopt(workdir, config)
        else:
            pretrained.adopt(config)
            initialize = functools.partial(pretrained.initialize, path=config.init_checkpoint)
    run_folder.check_model(workdir, config)
    if checkpoint.steps(workdir)[-1:] == [total_steps(config)] and (finished := run_folder.read_report(workdir)):
        if is_first:
            print(f"finished before: {total_steps(config)} steps, in {workdir}\n{finished}", flush=True)
            if changed := "; ".join(run_folder.changes(workdir, config)):
                print(f"trained with other settings than these: {changed}. For a new run take another --workdir")
        return

    from bertjax.tasks import fill_mask, pretraining
    from bertjax.training.loop import train

    mesh = make_mesh(config)
    records, tokenizer = pretraining.find_or_prepare(config, workdir)
    run_folder.check_tokenizer(workdir, tokenizer)
    if initialize is not None:
        pretrained.check_tokenizer(config.init_checkpoint, tokenizer)
    fill_mask.check(config.eval.fill_masks, tokenizer, config.model.max_position_embeddings)
    task = pretraining.Pretraining(config, mesh, records)
    if is_first:
        if (changed := run_folder.changes(workdir, config)) and checkpoint.steps(workdir):
            print(f"going on with other settings than before: {'; '.join(changed)}")
        run_folder.write_config(workdir, config, tokenizer)
        print(f"training in {workdir}", flush=True)
    state, scores = train(task, config, workdir, mesh, initialize)

    params = local_copy(state.params, mesh)
    if is_first:
        lines = [pretraining.report(scores)]
        filled = fill_mask.fill_masks(task.model, params, tokenizer, config.eval.fill_masks)
        lines += [fill_mask.describe(text) for text in filled]
        print("\n".join(lines), flush=True)
        run_folder.write_report(workdir, "\n".join(lines))
    hosts.leave()


if __name__ == "__main__":
    command.run(main)
