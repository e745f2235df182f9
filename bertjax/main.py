"""Trains BERT: python -m bertjax.main --config=experiments/quickstart.py

The config says everything; --config.x.y=VALUE overrides a field. Records and vocabulary are prepared from the corpus
where the config names none. The same command goes on where it stopped.
"""

import functools

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
    from etils import epath

    from bertjax.sharding import hosts
    from bertjax.sharding.mesh import use_cpu_cores
    from bertjax.training import run_folder

    command.keep_compiled()
    batch_size = config.batch_size
    if config.get("sweep"):  # checked before any device is touched
        from bertjax.tasks import sweep

        batch_size = sweep.shared_batch_size(config)
    hosts.join(config.hosts_timeout)
    use_cpu_cores(config, batch_size)
    run_folder.check_shared(workdir)
    pretrain_or_tune = pretrain if config.task == "pretraining" else fine_tune
    pretrain_or_tune(config, epath.Path(workdir))
    hosts.leave()


def pretrain(config, workdir) -> None:
    import jax

    from bertjax.config import total_steps
    from bertjax.sharding.mesh import local_copy, make_mesh
    from bertjax.tasks import fill_mask, pretraining
    from bertjax.training import checkpoint, run_folder
    from bertjax.training.loop import train

    is_first, initialize = jax.process_index() == 0, None
    if config.init_checkpoint:
        from bertjax.interop import pretrained

        if checkpoint.steps(workdir):  # goes on, also when what it was started from is gone
            run_folder.adopt(workdir, config)
        else:
            pretrained.adopt(config)
            initialize = functools.partial(pretrained.initialize, path=config.init_checkpoint)
    run_folder.check_task(workdir, config)
    run_folder.check_model(workdir, config)
    if checkpoint.steps(workdir)[-1:] == [total_steps(config)] and (finished := run_folder.read_report(workdir)):
        if is_first:
            print(f"finished before: {total_steps(config)} steps, in {workdir}\n{finished}", flush=True)
            _say_changes(workdir, config)
        return

    mesh = make_mesh(config)
    records, tokenizer = pretraining.find_or_prepare(config, workdir)
    run_folder.check_tokenizer(workdir, tokenizer)
    if initialize:
        pretrained.check_tokenizer(config.init_checkpoint, tokenizer)
    fill_mask.check(config.eval.fill_masks, tokenizer, config.model.max_position_embeddings)
    task = pretraining.Pretraining(config, mesh, records)
    if is_first:
        if (changed := run_folder.changes(workdir, config)) and checkpoint.steps(workdir):
            print(f"going on with other settings than before: {'; '.join(changed)}")
        if (warmup := config.optimizer.warmup_steps) >= task.total_steps:
            print(f"config.optimizer.warmup_steps = {warmup}: the {task.total_steps} steps end before the warm-up does")
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


def fine_tune(config, workdir) -> None:
    import jax

    from bertjax.config import UserError, validate
    from bertjax.files import write_whole
    from bertjax.interop import pretrained
    from bertjax.sharding.mesh import make_mesh
    from bertjax.tasks import finetuning, sweep
    from bertjax.training import checkpoint, run_folder
    from bertjax.training.loop import train

    is_first, initialize = jax.process_index() == 0, None
    run_folder.check_task(workdir, config)
    if finished := run_folder.read_report(workdir):
        if is_first:
            print(f"finished before, in {workdir}\n{finished}", flush=True)
            _say_changes(workdir, config)
        return
    goes_on = bool(checkpoint.steps(workdir))
    if goes_on:  # also when what it was started from is gone
        before = run_folder.read_config(workdir).model
        config.model.update({name: value for name, value in before.items() if "dropout" not in name})
        tokenizer = run_folder.load_tokenizer(workdir)
        if config.max_seq_length > (most := config.model.max_position_embeddings):
            raise UserError(f"config.max_seq_length = {config.max_seq_length}: the model has {most} positions only")
    else:
        pretrained.adopt_model(config)
        tokenizer = pretrained.require_tokenizer(config)
        initialize = functools.partial(pretrained.initialize, path=config.init_checkpoint, encoder_only=True)
    runs = [trial for _, trial in sweep.plan(config)] if config.sweep else [config]
    for trial in runs:
        validate(trial)  # now that the model is known
        mesh = make_mesh(trial)
    dataset = finetuning.load(config, tokenizer)
    run_folder.check_labels(workdir, dataset.labels)
    if is_first:
        print("\n".join(dataset.said), flush=True)
        if goes_on and (changed := run_folder.changes(workdir, config)):
            print(f"going on with other settings than before: {'; '.join(changed)}")
        print(f"fine-tuning in {workdir}", flush=True)
    if config.sweep:
        found = sweep.run(config, workdir, mesh, dataset, tokenizer, initialize)
        if is_first:
            print(found, end="", flush=True)
        return

    task = finetuning.FineTuning(config, mesh, dataset)
    if is_first:
        run_folder.write_config(workdir, config, tokenizer, dataset.objective.architecture, dataset.labels)
    config.eval.every_steps = config.eval.every_steps or task.steps_per_epoch
    _, scores = train(task, config, workdir, mesh, initialize)
    if is_first:
        for name, content in task.files.items():
            write_whole(workdir / name, content)
        run_folder.write_report(workdir, finetuning.report(scores))
        print(finetuning.report(scores), flush=True)


def _say_changes(workdir, config) -> None:
    from bertjax.training import run_folder

    if changed := "; ".join(run_folder.changes(workdir, config)):
        print(f"trained with other settings than these: {changed}. For a new run take another --workdir", flush=True)


if __name__ == "__main__":
    command.run(main)
