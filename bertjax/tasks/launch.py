"""Launches a config on all hosts: pre-training, fine-tuning, or a search over fine-tuning runs."""

from etils import epath

from bertjax import tasks
from bertjax.sharding import hosts
from bertjax.sharding.mesh import use_cpu_cores


def launch(config, workdir: epath.PathLike) -> None:
    """Trains a validated config in `workdir` and prints the report; a finished run only prints its report."""
    batch_size = config.batch_size
    if config.get("sweep"):  # checked before any device is touched
        from bertjax.tasks import sweep

        batch_size = sweep.shared_batch_size(config)
    hosts.join(config.hosts_timeout)
    use_cpu_cores(config, batch_size)
    hosts.check_shared(workdir)
    workdir = epath.Path(workdir)

    from bertjax.tasks import finetuning, pretraining, sweep
    from bertjax.training.run import run

    if config.get("sweep"):
        sweep.run(config, workdir)
    else:
        sweep.refuse_search(workdir)
        run(pretraining.KIND if config.task == tasks.PRETRAINING else finetuning.KIND, config, workdir)
    hosts.leave()
