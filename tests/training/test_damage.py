"""Damaged checkpoints: after any damage to a file, a run resumes from values that were saved."""

import random
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax.common import checksums
from bertjax.common.errors import UserError
from bertjax.training.checkpoints import checkpoint
from bertjax.training.loop import train_task
from tests.training.toy import Toy, toy_config


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A finished run with the checkpoints of steps 8, 9 and 10."""
    workdir = tmp_path_factory.mktemp("saved")
    task = Toy(toy_config(checkpoint=dict(every_steps=1, keep=3), eval=dict(every_steps=2)), scores=range(5))
    train_task(task, task.config, workdir, task.mesh)
    assert checkpoint.steps(workdir) == [8, 9, 10]
    return workdir


def values(workdir, step):
    items = {item: checkpoint._read_item(workdir, step, item, None) for item in ("params", "rest")}
    return {name: np.asarray(x).tolist() for name, x in checksums.arrays_by_name(items).items()}


def truncate(path, other):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path, other):
    content = bytearray(path.read_bytes())
    content[random.Random(path.name).randrange(len(content))] ^= 1 << random.Random(path.name).randrange(8)
    path.write_bytes(content)


def delete(path, other):
    path.unlink()


def swap(path, other):
    """Swaps the file with the file of another step; files with values have unique names."""
    if not other.exists():
        other = max(filter(lambda file: file.is_file(), other.parent.iterdir()), key=lambda file: file.stat().st_size)
    shutil.copy(other, path)


@pytest.mark.slow
@pytest.mark.parametrize("part, damage", enumerate([truncate, flip, delete, swap]))
def test_damaged_values_are_never_restored(saved, tmp_path, part, damage, capsys):
    """Each type of damage is applied to all files with values, and to a fourth of the other files."""
    names = sorted(str(path.relative_to(saved)) for path in (saved / "checkpoints/10").rglob("*") if path.is_file())
    with_values = [name for name in names if "params/d/" in name or "rest/d/" in name]
    other_files = [name for name in names if name not in with_values and (saved / name).stat().st_size]
    pristine, steps_read = {step: values(saved, step) for step in (9, 10)}, {}
    for number, name in enumerate(with_values + other_files[part::4]):
        workdir = tmp_path / str(number)
        shutil.copytree(saved, workdir)
        damage(workdir / name, workdir / name.replace("checkpoints/10", "checkpoints/9"))
        steps_read[name] = step = checkpoint.latest_intact_step(workdir)
        assert values(workdir, step) == pristine[step], name
        if step == 9:
            moved = workdir / checkpoint.DAMAGED_FOLDER / "10"
            assert moved.is_dir() and not (workdir / "checkpoints/10").exists()
            line = capsys.readouterr().out
            assert f"{workdir}/checkpoints/10" in line and str(moved) in line and line.count("\n") == 1, line
    for folder in ("params/d/", "rest/d/"):
        assert any(step == 9 for name, step in steps_read.items() if folder in name), steps_read


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of the workdir of the run."""
    return shutil.copytree(saved, tmp_path / "run")


@pytest.mark.parametrize("make", ["empty", "stray", "renamed"])
def test_invalid_checkpoint_folders_are_moved_away(copied, make):
    folder = copied / "checkpoints" / str(newest := 10 if make == "empty" else 999_999)
    if make == "renamed":
        (copied / "checkpoints/10").rename(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    assert checkpoint.latest_intact_step(copied) == (10 if make == "stray" else 9)
    assert (copied / checkpoint.DAMAGED_FOLDER / str(newest)).is_dir()


def test_a_run_without_an_intact_checkpoint_does_not_restart(copied):
    for step in checkpoint.steps(copied):
        shutil.rmtree(copied / "checkpoints" / str(step) / "params")
    for _ in range(2):
        with pytest.raises(UserError, match=r"all checkpoints were damaged, see .*checkpoints-damaged"):
            checkpoint.latest_intact_step(copied)
    assert checkpoint.latest_intact_step(copied.parent / "new") is None


def test_damaged_params_are_refused_in_prediction(copied):
    shutil.rmtree(copied / "checkpoints/9/params")
    shutil.copytree(copied / "checkpoints/10/params", copied / "checkpoints/9/params")
    with pytest.raises(UserError, match=r"checkpoints/9/params: damaged"):
        checkpoint.read_params(copied, 9)
    assert checkpoint.steps(copied) == [8, 9, 10]  # readers move nothing


def test_a_changed_checksum_is_damage(copied):
    path = copied / "checkpoints/10" / checkpoint.CHECKSUMS_FILE
    content = path.read_bytes()
    for place in range(0, len(content), len(content) // 40):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert checkpoint._describe_damage(copied, 10) or content[place : place + 1].isspace(), place
    path.write_bytes(content)
    assert not checkpoint._describe_damage(copied, 10)
    shutil.rmtree(copied / "checkpoints/10/checksums")  # like checkpoints without checksums
    assert checkpoint.latest_intact_step(copied) == 10


def test_checkpoints_with_other_read_errors_are_not_moved(copied, monkeypatch):

    def fail(*_, **__):
        raise ValueError("UNAVAILABLE: the storage is down")

    monkeypatch.setattr(checkpoint.ocp.Checkpointer, "restore", fail)
    with pytest.raises(UserError, match="params: cannot be read now"):
        checkpoint.latest_intact_step(copied)
    assert checkpoint.steps(copied) == [8, 9, 10] and not (copied / checkpoint.DAMAGED_FOLDER).exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_checksums_are_equal_on_any_mesh_and_detect_every_change(dtype):
    values = np.random.default_rng(0).integers(0, 200, (16, 24, 3)).astype(dtype)
    expected = checksums.of_numpy(values)
    for shape, spec in (((8, 1), ("a",)), ((2, 4), ("b", "a")), ((1, 1), ())):
        mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b"))
        x = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
        assert int(checksums.of_sharded({"x": x})["x"]) == checksums.of_tree({"x": x})["x"] == expected
    assert int(checksums.of_sharded({"x": values[0, 0, 0]})["x"]) == checksums.of_numpy(values[0, 0, 0])
    rng = np.random.default_rng(1)
    for _ in range(50):
        other = values.copy()
        flat = other.reshape(-1).view(np.uint8)
        flat[rng.integers(flat.size)] ^= np.uint8(1 << rng.integers(8))
        assert checksums.of_numpy(other) != expected
    swapped = values.reshape(-1).copy()
    i, j = 5, next(j for j in range(6, swapped.size) if swapped[j] != swapped[5])
    swapped[[i, j]] = swapped[[j, i]]
    assert checksums.of_numpy(swapped.reshape(values.shape)) != expected


def test_checksums_of_large_arrays_are_computed_in_parts(monkeypatch):
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    whole = checksums.of_numpy(x)
    monkeypatch.setattr(checksums, "PART", 64)
    assert checksums.of_numpy(x) == whole
