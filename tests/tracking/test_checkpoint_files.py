"""Checkpoints: whole or not there, verified, free of code, and always an older one to fall back to."""

import errno
import hashlib
import os
import pickle
import resource
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from hurtle.errors import CheckpointError, HurtleError
from hurtle.tracking import checkpoints as module
from hurtle.tracking.checkpoints import FORMAT, Checkpoints, is_whole, load_checkpoint, save_checkpoint

RECORD = np.dtype([("x", "f4"), ("grid", "u1", (2, 3)), ("rng", [("state", "<u8"), ("on", "?")])], align=True)


def some_state(seed=0):
    rng = np.random.default_rng(seed)
    records = np.frombuffer(rng.bytes(4 * RECORD.itemsize), RECORD).copy()
    network = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.ones(3)).sum().backward()
    optimizer.step()
    return {
        "settings": {"env": "cartpole", "hidden_sizes": [64, 64], "target_kl": None, "anneal": True},
        "policy": network.state_dict(),
        "algorithm": optimizer.state_dict(),
        "collector": {"0.envs": records, "obs": rng.normal(size=(2, 3)).astype(np.float32)[:, ::2]},
        "shapes": {
            "empty": np.empty((0, 4)),
            "scalar": np.array(2.5),
            "words": np.array(["ab", "c"]),
            "flags": np.array([True]),
        },
        "rng": {"numpy": np.random.PCG64(seed).state, "torch": torch.get_rng_state(), "bytes": b"\x00\xff"},
        "numbers": (1, -(2**70), 0.1, float("inf"), np.float32(0.5), np.int64(7), np.bool_(True), {3: "int key"}),
    }


def assert_same(found, expected, where="state"):
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        assert found.tobytes() == expected.tobytes(), where
        assert found.flags.writeable, where
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, (dict, OrderedDict)):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert found == expected, where


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back_bit_for_bit(tmp_path):
    state = some_state()
    save_checkpoint(tmp_path / "a.pt", state)
    assert_same(load_checkpoint(tmp_path / "a.pt"), {"format": FORMAT, **state})
    assert names(tmp_path) == ["a.pt"]


def test_the_file_is_an_ordinary_zip_that_torch_reads(tmp_path):
    save_checkpoint(tmp_path / "a.pt", {"weights": torch.arange(4.0)})
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
        assert len(archive.comment) == 64
    assert torch.load(tmp_path / "a.pt", weights_only=True)["weights"].tolist() == [0, 1, 2, 3]


def test_a_view_is_saved_without_the_rest_of_its_memory(tmp_path):
    rows = torch.arange(100_000.0).view(100, 1000)
    save_checkpoint(tmp_path / "a.pt", {"row": rows[3]})
    assert (tmp_path / "a.pt").stat().st_size < 10_000
    assert torch.equal(load_checkpoint(tmp_path / "a.pt")["row"], rows[3])


def test_arrays_that_change_later_do_not_change_the_checkpoint(tmp_path):
    array = np.zeros(3)
    save_checkpoint(tmp_path / "a.pt", {"obs": array})
    array[:] = 1
    assert load_checkpoint(tmp_path / "a.pt")["obs"].tolist() == [0, 0, 0]


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"algorithm\.groups\[1\]\.path is a pathlib\.\w*Path; checkpoints contain only"):
        save_checkpoint(tmp_path / "a.pt", {"algorithm": {"groups": [1, {"path": Path()}]}})
    with pytest.raises(CheckpointError, match=r"objects is a numpy\.ndarray"):
        save_checkpoint(tmp_path / "a.pt", {"objects": np.array([object()])})
    assert names(tmp_path) == []


# Damage


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_byte_is_noticed(tmp_path, every):
    file = tmp_path / "step-000000000002.pt"
    save_checkpoint(file, {"weights": torch.arange(4.0), "n": 1})
    whole = file.read_bytes()
    for index in range(0, len(whole), every):
        file.write_bytes(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
        assert not is_whole(file), index
    file.write_bytes(whole)
    assert is_whole(file)


@pytest.mark.parametrize(
    "damage",
    {
        "cut in the middle": lambda data: data[: len(data) // 2],
        "cut by one byte": lambda data: data[:-1],
        "first byte lost": lambda data: data[1:],
        "a byte more": lambda data: data + b"\0",
        "flipped": lambda data: data[:700] + bytes([data[700] ^ 1]) + data[701:],
        "empty": lambda data: b"",
        "short": lambda data: b"PK",
        "only a digest": lambda data: hashlib.sha256(b"").hexdigest().encode(),
        "zeros": lambda data: bytes(len(data)),
        "text": lambda data: b"this is not a checkpoint\n" * 20,
    }.items(),
    ids=lambda damage: damage[0],
)
def test_damage_names_the_file_and_offers_the_older_one(tmp_path, damage):
    saved = Checkpoints(tmp_path, keep=3)
    paths = [saved.save(step, some_state(step)) for step in (1000, 2000, 3000)]
    for path in paths[1:]:
        path.write_bytes(damage[1](path.read_bytes()))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(paths[2])
    assert str(paths[2]) in str(error.value)
    assert "damaged or not a Hurtle checkpoint" in str(error.value)
    assert f"hurtle train --resume {paths[0]}" in str(error.value)  # 2000 is damaged as well
    assert saved.latest() == paths[0]
    assert_same(load_checkpoint(paths[0])["collector"], some_state(1000)["collector"])


def test_missing_files_and_no_older_one(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint file .*best.pt. There is no older one"):
        load_checkpoint(tmp_path / "best.pt")
    first = Checkpoints(tmp_path).save(10, {})
    with pytest.raises(CheckpointError, match=f"--resume {first}"):
        load_checkpoint(tmp_path / "best.pt")  # without a step in its name, the newest is offered
    with pytest.raises(CheckpointError, match="There is no older one"):
        load_checkpoint(tmp_path / "step-000000000005.pt")
    with pytest.raises(CheckpointError, match="There is no checkpoint file"):
        load_checkpoint(tmp_path)
    first.write_bytes(b"")
    with pytest.raises(CheckpointError, match="There is no older one"):
        load_checkpoint(first)
    assert Checkpoints(tmp_path).latest() is None
    assert Checkpoints(tmp_path / "nowhere").latest() is None


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 7)
    save_checkpoint(tmp_path / "a.pt", {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=f"has checkpoint format 7; this version of Hurtle reads format {FORMAT}"):
        load_checkpoint(tmp_path / "a.pt")


# Code in files


class Malicious:
    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


def signed(path):
    """Give a foreign torch file the checksum of a checkpoint, as an attacker would."""
    data = path.read_bytes()[:-2] + (64).to_bytes(2, "little")
    path.write_bytes(data + hashlib.sha256(data).hexdigest().encode())


def test_a_foreign_torch_file_never_runs_code(tmp_path):
    proof, file = tmp_path / "it-ran", tmp_path / "step-000000000002.pt"
    older = Checkpoints(tmp_path).save(1, {"n": 1})
    torch.save({"format": FORMAT, "policy": Malicious(proof)}, file)
    with pytest.raises(CheckpointError, match="damaged or not a Hurtle checkpoint"):
        load_checkpoint(file)
    signed(file)
    assert is_whole(file)
    with pytest.raises(CheckpointError, match="Hurtle runs no code from checkpoints") as error:
        load_checkpoint(file)
    assert str(older) in str(error.value)
    file.write_bytes(pickle.dumps(Malicious(proof), protocol=2))
    signed(file)
    with pytest.raises(CheckpointError, match="no code"):
        load_checkpoint(file)
    assert not proof.exists()
    torch.save(Malicious(proof), file)
    torch.load(file, weights_only=False)
    assert proof.exists()  # the payload works where nobody looks


def test_arrays_cannot_smuggle_objects(tmp_path):
    file = tmp_path / "a.pt"
    torch.save(
        {"format": FORMAT, "x": {"__numpy_dtype__": "|O", "shape": (1,), "data": torch.zeros(8, dtype=torch.uint8)}}, file
    )
    signed(file)
    with pytest.raises(CheckpointError):
        load_checkpoint(file)


# Writing that fails


class FullDisk:
    """A file on a disk with room for `room` bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)


def test_a_full_disk_leaves_the_older_checkpoints(tmp_path, monkeypatch):
    saved = Checkpoints(tmp_path, keep=1)
    older = saved.save(1, some_state(1))
    best = saved.save(1, some_state(1), best=True)
    sink = module._Sink
    for room in (0, 100, 2000):
        with monkeypatch.context() as patch:
            patch.setattr(module, "_Sink", lambda file, room=room: sink(FullDisk(file, room)))
            with pytest.raises(CheckpointError, match=r"step-000000000002.pt could not be written: No space left on device"):
                saved.save(2, some_state(2))
            with pytest.raises(CheckpointError, match="No space left"):
                saved.save(2, some_state(2), best=True)
    assert set(tmp_path.iterdir()) == {older, best}
    assert_same(load_checkpoint(older)["collector"], some_state(1)["collector"])
    assert is_whole(best)
    assert saved.save(2, some_state(2)).name == "step-000000000002.pt"  # room again


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failures_after_the_write(tmp_path, monkeypatch, call):
    older = Checkpoints(tmp_path).save(1, {"n": 1})

    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(*{"fsync": (os, "fsync"), "replace": (Path, "replace")}[call], fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        Checkpoints(tmp_path).save(2, {"n": 2})
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [older]


def test_an_interrupt_while_writing_leaves_no_trace(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "a.pt", {})
    assert list(tmp_path.iterdir()) == []


def test_a_real_limit_on_file_size(tmp_path):
    saved = Checkpoints(tmp_path)
    saved.save(1, {"weights": torch.ones(1000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="could not be written: File too large"):
            saved.save(2, {"weights": torch.ones(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001.pt"]
    assert load_checkpoint(saved.latest())["weights"].sum().item() == 1000.0


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be created"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(1, {})


# The run's checkpoints


def test_the_newest_few_and_the_best_stay(tmp_path):
    saved = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert saved.all() == []
    saved.save(5, {"n": 5}, best=True)
    paths = [saved.save(step, {"n": step}) for step in (1, 20, 102_400, 10**12)]
    assert paths[2].name == "step-000000102400.pt"
    assert saved.all() == paths[2:]
    assert saved.latest() == paths[3]
    assert load_checkpoint(saved.folder / "best.pt")["n"] == 5
    saved.save(30, {"n": 30}, best=True)
    assert load_checkpoint(saved.folder / "best.pt")["n"] == 30
    with pytest.raises(HurtleError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_going_back_replaces_the_later_ones(tmp_path):
    saved = Checkpoints(tmp_path, keep=3)
    for step in (100, 200, 300):
        saved.save(step, {})
    path = saved.save(150, {})  # resumed from 100: 200 and 300 belong to a run that is no more
    assert names(tmp_path) == ["step-000000000100.pt", "step-000000000150.pt"]
    assert saved.latest() == path


def test_other_files_are_left_alone_but_for_interrupted_writes(tmp_path):
    for name in ("notes.txt", "step-final.pt", "step-1.pt.bak", ".step-000000000001.pt.tmp"):
        (tmp_path / name).write_text("")
    saved = Checkpoints(tmp_path, keep=1)
    saved.save(2, {})
    saved.save(3, {})
    assert names(tmp_path) == ["notes.txt", "step-000000000003.pt", "step-1.pt.bak", "step-final.pt"]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    saved = Checkpoints(tmp_path)
    saved.save(1, {"n": 1})
    assert load_checkpoint(saved.save(1, {"n": 2}))["n"] == 2
    assert len(saved.all()) == 1
