"""Checkpoints that are not what was saved: whatever happens to a file, a run goes on from values that were saved."""

import random
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bertjax.config import UserError
from bertjax.training import checkpoint, checksums
from bertjax.training.loop import train
from tests.training.toy import Toy, toy_config


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A finished run with the checkpoints of steps 8, 9 and 10."""
    workdir = tmp_path_factory.mktemp("saved")
    task = Toy(toy_config(checkpoint=dict(every_steps=1, keep=3), eval=dict(every_steps=2)), scores=range(5))
    train(task, task.config, workdir, task.mesh)
    assert checkpoint.steps(workdir) == [8, 9, 10]
    return workdir


def values(workdir, step):
    found = {item: checkpoint._read(workdir, step, item, None) for item in ("params", "rest")}
    return {name: np.asarray(x).tolist() for name, x in checksums.names_of(found).items()}


def truncate(path, other):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path, other):
    content = bytearray(path.read_bytes())
    content[random.Random(path.name).randrange(len(content))] ^= 1 << random.Random(path.name).randrange(8)
    path.write_bytes(content)


def delete(path, other):
    path.unlink()


def swap(path, other):
    """With the file of another step; those with values have names of their own."""
    if not other.exists():
        other = max(filter(lambda file: file.is_file(), other.parent.iterdir()), key=lambda file: file.stat().st_size)
    shutil.copy(other, path)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [truncate, flip, delete, swap])
def test_no_value_is_believed_that_was_not_saved(saved, tmp_path, damage, capsys):
    names = sorted(path.relative_to(saved) for path in (saved / "checkpoints/10").rglob("*") if path.stat().st_size)
    names = [name for name in names if (saved / name).is_file()]
    pristine, found = {step: values(saved, step) for step in (9, 10)}, {}
    for number, name in enumerate(names):
        workdir = tmp_path / str(number)
        shutil.copytree(saved, workdir)
        damage(workdir / name, workdir / str(name).replace("checkpoints/10", "checkpoints/9"))
        found[str(name)] = step = checkpoint.latest_intact_step(workdir)
        assert values(workdir, step) == pristine[step], name
        if step == 9:
            moved = workdir / checkpoint.DAMAGED_FOLDER / "10"
            assert moved.is_dir() and not (workdir / "checkpoints/10").exists()
            line = capsys.readouterr().out
            assert f"{workdir}/checkpoints/10" in line and str(moved) in line and line.count("\n") == 1, line
    assert any(step == 9 for name, step in found.items() if "params/d/" in name), found
    assert any(step == 9 for name, step in found.items() if "rest/d/" in name), found


@pytest.mark.parametrize("make", ["empty", "stray", "renamed"])
def test_a_folder_that_is_no_checkpoint_stops_nobody(saved, tmp_path, make):
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    folder = workdir / "checkpoints" / str(newest := 10 if make == "empty" else 999_999)
    if make == "renamed":
        (workdir / "checkpoints/10").rename(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    assert checkpoint.latest_intact_step(workdir) == (10 if make == "stray" else 9)
    assert (workdir / checkpoint.DAMAGED_FOLDER / str(newest)).is_dir()


def test_where_none_is_left_the_run_is_not_begun_anew(saved, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    for step in checkpoint.steps(workdir):
        shutil.rmtree(workdir / "checkpoints" / str(step) / "params")
    for _ in range(2):
        with pytest.raises(UserError, match=r"all its checkpoints were damaged, see .*checkpoints-damaged"):
            checkpoint.latest_intact_step(workdir)
    assert checkpoint.latest_intact_step(tmp_path / "new") is None


def test_damaged_params_are_not_predicted_with(saved, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    shutil.rmtree(workdir / "checkpoints/9/params")
    shutil.copytree(workdir / "checkpoints/10/params", workdir / "checkpoints/9/params")
    with pytest.raises(UserError, match=r"checkpoints/9/params: damaged"):
        checkpoint.read_params(workdir, 9)
    assert checkpoint.steps(workdir) == [8, 9, 10]  # who only reads moves nothing


@pytest.mark.slow
def test_a_flipped_letter_of_the_checksums_is_damage(saved, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    path = workdir / "checkpoints/10" / checkpoint.CHECKSUMS_FILE
    content = path.read_bytes()
    for place in range(0, len(content), 3):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert checkpoint._find_damage(workdir, 10) or content[place : place + 1].isspace(), place
    path.write_bytes(content)
    assert not checkpoint._find_damage(workdir, 10)


def test_what_cannot_be_read_for_another_reason_is_not_moved_away(saved, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)

    def fail(*_, **__):
        raise ValueError("UNAVAILABLE: the storage is down")

    monkeypatch.setattr(checkpoint.ocp.Checkpointer, "restore", fail)
    with pytest.raises(UserError, match="params: cannot be read now"):
        checkpoint.latest_intact_step(workdir)
    assert checkpoint.steps(workdir) == [8, 9, 10] and not (workdir / checkpoint.DAMAGED_FOLDER).exists()


def test_a_checkpoint_from_before_checksums_is_read(saved, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    shutil.rmtree(workdir / "checkpoints/10/checksums")
    assert checkpoint.latest_intact_step(workdir) == 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_a_checksum_is_the_same_on_any_mesh_and_sees_every_change(dtype):
    values = np.random.default_rng(0).integers(0, 200, (16, 24, 3)).astype(dtype)
    expected = checksums.of_numpy(values)
    for shape, spec in (((8, 1), ("a",)), ((2, 4), ("b", "a")), ((1, 1), ())):
        mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b"))
        x = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
        assert int(checksums.on_devices({"x": x})["x"]) == expected
    assert int(checksums.on_devices({"x": values[0, 0, 0]})["x"]) == checksums.of_numpy(values[0, 0, 0])
    rng = np.random.default_rng(1)
    for _ in range(200):
        other = values.copy()
        flat = other.reshape(-1).view(np.uint8)
        flat[rng.integers(flat.size)] ^= np.uint8(1 << rng.integers(8))
        assert checksums.of_numpy(other) != expected
    swapped = values.reshape(-1).copy()
    i, j = 5, next(j for j in range(6, swapped.size) if swapped[j] != swapped[5])
    swapped[[i, j]] = swapped[[j, i]]
    assert checksums.of_numpy(swapped.reshape(values.shape)) != expected


def test_parts_of_a_large_array_are_added_up(monkeypatch):
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    whole = checksums.of_numpy(x)
    monkeypatch.setattr(checksums, "PART", 64)
    assert checksums.of_numpy(x) == whole
