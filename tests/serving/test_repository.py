"""Models from files and folders: versions, hot reload, refused versions, and paths that must not escape."""

import asyncio
import json
import os
import shutil

import numpy as np
import pytest
from serving_helpers import Answers, run

from hurtle.errors import HurtleError, ServingError
from hurtle.serving.config import ServeConfig
from hurtle.serving.messages import InferRequest
from hurtle.serving.repository import Repository

BACKEND = "serving_helpers:Doubler"


def write(root, name, version, text="{}"):
    folder = root / name / version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.test").write_text(text)


def affine(root, name, version, scale):
    folder = root / name / version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.json").write_text(json.dumps({"scale": scale, "shift": 0.0, "size": 3}))


def repository(*models, **options):
    return Repository(ServeConfig(models=tuple(map(str, models)), **options))


def states(found):
    return [(row["name"], row["version"], row["state"]) for row in found.index()]


def test_the_newest_version_answers_unless_another_is_asked_for(tmp_path):
    async def main():
        for version in ("1", "10", "9"):
            write(tmp_path, "m", version)
        found = repository(tmp_path, backend=BACKEND)
        assert found.names() == ["m"]
        await found.load("m")
        assert found.find("m").version == "10"
        assert found.find("m", "9").version == "9"
        assert found.versions("m") == ["1", "9", "10"]
        assert states(found) == [("m", "1", "READY"), ("m", "9", "READY"), ("m", "10", "READY")]
        with pytest.raises(ServingError, match=r"'m' has no version '2'; loaded versions: 1, 9, 10"):
            found.find("m", "2")
        with pytest.raises(ServingError, match=r"No model 'n'. Known: m"):
            found.find("n")
        found.close()

    run(main())


def test_reloading_swaps_what_changed_and_finishes_what_runs(tmp_path):
    async def main():
        write(tmp_path, "m", "1")
        found = repository(tmp_path, backend=BACKEND, executor="worker", lanes=1, parameters={"delay": "0.1"})
        await found.load("m")
        old, answers = found.find("m"), Answers()
        for _ in range(8):  # longer than the new ones take to load
            old.infer(InferRequest("m", {"x": np.ones((1, 3), np.float32)}), answers.append)
        await found.load("m")
        assert found.find("m") is old  # nothing changed
        write(tmp_path, "m", "1", "changed")
        write(tmp_path, "m", "2")
        await found.load("m")
        assert found.find("m").version == "2"
        assert found.find("m", "1") is not old
        assert old in found.retiring()
        await answers.wait(8)
        assert {float(answer.outputs["y"][0, 0]) for answer in answers} == {2.0}
        for _ in range(100):
            await asyncio.sleep(0.01)
            if old.executor.backend.closed:
                break
        assert old.executor.backend.closed
        assert not found.retiring()
        found.close()

    run(main())


def test_a_version_that_cannot_be_loaded_is_refused_and_the_old_one_serves_on(tmp_path):
    async def main():
        affine(tmp_path, "m", "1", 2.0)
        found = repository(tmp_path, backend="affine")
        await found.load("m")
        old = found.find("m")
        (tmp_path / "m" / "1" / "model.json").write_text("{broken")
        affine(tmp_path, "m", "2", "not a number")
        with pytest.raises(
            ServingError, match=r"version 1 was refused; the old one goes on serving.*version 2 was refused"
        ) as bad:
            await found.load("m")
        assert bad.value.reason == "failed_precondition"
        assert found.find("m") is old
        assert states(found) == [("m", "1", "READY"), ("m", "2", "UNAVAILABLE")]
        affine(tmp_path, "m", "2", 3.0)
        affine(tmp_path, "m", "1", 4.0)
        await found.load("m")
        assert found.versions("m") == ["1", "2"]
        found.close()

    run(main())


def reasons(found):
    return {(row["name"], row["version"]): (row["state"], row["reason"]) for row in found.index(on_disk=found.on_disk())}


def test_the_index_says_why_a_reload_was_refused(tmp_path):
    async def main():
        affine(tmp_path, "m", "1", 2.0)
        found = repository(tmp_path, backend="affine")
        await found.load("m")
        good = (tmp_path / "m" / "1" / "model.json").stat()
        (tmp_path / "m" / "1" / "model.json").write_text("{broken")
        with pytest.raises(ServingError, match="goes on serving"):
            await found.load("m")
        state, reason = reasons(found)["m", "1"]
        assert state == "READY"
        assert "newer files were refused" in reason
        assert "model.json" in reason
        affine(tmp_path, "m", "1", 2.0)
        os.utime(tmp_path / "m" / "1" / "model.json", ns=(good.st_atime_ns, good.st_mtime_ns))
        await found.load("m")  # the old files are back
        assert reasons(found) == {("m", "1"): ("READY", "")}
        (tmp_path / "m" / "1" / "model.json").write_text("{broken")
        await found.refresh()
        assert "newer files were refused" in reasons(found)["m", "1"][1]
        affine(tmp_path, "m", "1", 3.0)
        await found.load("m")
        assert reasons(found) == {("m", "1"): ("READY", "")}
        found.close()

    run(main())


def test_the_index_lists_what_lies_there_and_is_not_loaded(tmp_path):
    async def main():
        write(tmp_path, "m", "1")
        found = repository(tmp_path, backend=BACKEND)
        await found.load("m")
        write(tmp_path, "m", "2")
        write(tmp_path, "late", "3")
        (tmp_path / "flat").mkdir()
        (tmp_path / "flat" / "model.onnx").write_text("")
        listed = reasons(found)
        assert listed["m", "1"] == ("READY", "")
        assert listed["m", "2"] == listed["late", "3"] == ("UNAVAILABLE", "not loaded")
        state, reason = listed["flat", ""]
        assert state == "UNAVAILABLE"
        assert "model.onnx in no version's folder; expected flat/VERSION/model.onnx" in reason
        assert [row["version"] for row in found.index(only_ready=True)] == ["1"]
        found.close()

    run(main())


def test_wrong_layouts_are_named_with_what_was_expected(tmp_path):
    write(tmp_path, "good", "1")
    (tmp_path / "good" / "notes").mkdir()
    (tmp_path / ".git").mkdir()
    wrong = {
        "flat": ("flat/model.onnx", "model.onnx in no version's folder"),
        "letter": ("letter/v1/model.onnx", "'v1' is not a version number"),
        "other": ("other/1/other.txt", "1 has no file model.*, but other.txt"),
        "a b": ("a b/1/model.onnx", "cannot be a model's name"),
    }
    for path, _ in wrong.values():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("")
    (tmp_path / "void").mkdir()
    (tmp_path / "hollow" / "2").mkdir(parents=True)
    (tmp_path / "mixed" / "1").mkdir(parents=True)
    write(tmp_path, "mixed", "2")
    (tmp_path / "loose.onnx").write_text("")
    found = repository(tmp_path, backend=BACKEND)
    assert found.names() == ["good", "mixed"]
    problems = found.problems()
    assert len(problems) == len(wrong) + 4  # one per folder
    for folder, (_, text) in wrong.items():
        said = next(problem for problem in problems if problem.startswith(f"{tmp_path / folder}: "))
        assert text in said
        assert f"expected {folder}/VERSION/model.onnx, where VERSION is a number." in said
    assert any(problem.startswith(f"{tmp_path / 'void'}: it is empty;") for problem in problems)
    assert any(problem.startswith(f"{tmp_path / 'hollow'}: 2 is empty;") for problem in problems)
    assert any(problem.startswith(f"{tmp_path / 'mixed'}: 1 is empty;") for problem in problems)
    assert any(problem.startswith(f"{tmp_path}: loose.onnx in no model's folder;") for problem in problems)


def test_a_folder_that_leads_elsewhere_is_named(tmp_path):
    write(tmp_path / "outside", "m", "1")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "m").symlink_to(tmp_path / "outside" / "m")
    problems = repository(tmp_path / "root", backend=BACKEND).problems()
    assert len(problems) == 1
    assert "leads out of the repository" in problems[0]


def test_what_is_unloaded_is_gone_until_it_is_loaded_again(tmp_path):
    async def main():
        write(tmp_path, "m", "1")
        found = repository(tmp_path, backend=BACKEND)
        await found.load("m")
        await found.unload("m")
        assert states(found) == [("m", "1", "UNAVAILABLE")]
        assert not found.is_ready("m")
        with pytest.raises(ServingError, match="'m' is not ready: unloaded") as caught:
            found.find("m")
        assert caught.value.reason == "unavailable"
        await found.refresh()
        assert not found.is_ready("m")  # a client said so
        await found.load("m")
        assert found.is_ready("m")
        assert (found.is_ready("n"), found.has_model("n"), found.has_model("m")) == (False, False, True)
        with pytest.raises(ServingError, match="No model 'n' to unload"):
            await found.unload("n")
        found.close()

    run(main())


def test_watching_finds_new_changed_and_removed_versions(tmp_path):
    async def main():
        affine(tmp_path, "a", "1", 1.0)
        found = repository(tmp_path, backend="affine")
        await found.load("a")
        affine(tmp_path, "a", "2", 2.0)
        affine(tmp_path, "b", "1", 3.0)
        await found.refresh()
        assert [row[:2] for row in states(found)] == [("a", "1"), ("a", "2"), ("b", "1")]
        (tmp_path / "a" / "1" / "model.json").unlink()
        (tmp_path / "b" / "1" / "model.json").unlink()
        await found.refresh()
        assert found.versions("a") == ["2"]
        assert not found.is_ready("b")
        affine(tmp_path, "b", "1", 4.0)
        await found.refresh()
        assert found.is_ready("b")  # its files were away for a moment
        (tmp_path / "a" / "2" / "model.json").write_text("{half")
        tried = found.find("a")
        await found.refresh()
        await found.refresh()
        assert found.find("a") is tried
        found.close()

    run(main())


@pytest.mark.parametrize("gone", ["1", "."])
def test_what_vanishes_while_it_is_looked_at_is_not_there(tmp_path, monkeypatch, gone):
    affine(tmp_path, "a", "1", 1.0)
    affine(tmp_path, "a", "2", 1.0)

    def remove(path):
        if path.parent.name == "1":
            shutil.rmtree(tmp_path / "a" / gone)
        return True

    monkeypatch.setattr("hurtle.serving.layout.can_serve", remove)
    assert repository(tmp_path).names() == (["a"] if gone == "1" else [])


def test_files_are_models_by_their_name(tmp_path):
    async def main():
        (tmp_path / "policy.v2.test").write_text("")
        (tmp_path / "other.test").write_text("")
        write(tmp_path, "whole", "3")
        found = repository(
            tmp_path / "policy.v2.test",
            f"mine={tmp_path / 'other.test'}",
            tmp_path / "whole",
            backend=BACKEND,
            executor="inline",
        )
        assert found.names() == ["policy", "mine", "whole"]
        for name in found.names():
            await found.load(name)
        assert found.find("policy").version == "1"
        assert found.find("whole").version == "3"
        found.close()

    run(main())


def test_the_file_that_a_backend_knows_is_the_model(tmp_path):
    affine(tmp_path, "m", "1", 2.0)
    (tmp_path / "m" / "1" / "model.json").rename(tmp_path / "m" / "1" / "model.affine.json")
    (tmp_path / "m" / "1" / "model.aaa").write_text("")
    (tmp_path / "m" / "1" / "notes.txt").write_text("")

    async def main():
        found = repository(tmp_path)
        await found.load("m")
        assert found.find("m").metadata.platform == "hurtle_affine"
        found.close()

    run(main())


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", "a/b", "a\\b", "", ".", "a\0", "-x", "x" * 200, "link"])
def test_names_cannot_leave_the_folder(tmp_path, name):
    async def main():
        root = tmp_path / "zoo"
        write(root, "m", "1")
        write(tmp_path, "secret", "1")
        (root / "link").symlink_to(tmp_path / "secret")
        (root / "m" / "2").symlink_to(tmp_path / "secret" / "1")
        found = repository(root, backend=BACKEND)
        assert found.names() == ["m"]
        with pytest.raises(ServingError, match=r"cannot be a model's name|No model"):
            await found.load(name)
        await found.load("m")
        assert found.versions("m") == ["1"]
        found.close()

    run(main())


def test_a_model_file_that_is_a_link_out_of_the_repository_is_refused_with_that_reason(tmp_path):
    async def main():
        root = tmp_path / "zoo"
        write(root, "m", "1")
        write(tmp_path, "outside", "1")
        for name, version in (("m", "2"), ("n", "1"), ("p", "1")):
            (root / name / version).mkdir(parents=True)
            target = tmp_path / "outside" if name != "p" else root / "m"
            (root / name / version / "model.test").symlink_to(target / "1" / "model.test")
        found = repository(root, backend=BACKEND)
        for name, version in (("m", "2"), ("n", "1")):
            reason = f"{name}/{version}/model.test is a link that leads out of the repository"
            with pytest.raises(ServingError, match=reason) as caught:
                await found.load(name)
            assert caught.value.reason == "failed_precondition"
            (row,) = [row for row in found.index() if (row["name"], row["version"]) == (name, version)]
            assert (row["state"], reason in row["reason"]) == ("UNAVAILABLE", True)
        assert found.versions("m") == ["1"]
        await found.load("p")  # a link that stays inside
        found.close()

    run(main())


def test_a_folder_that_cannot_be_loaded_says_why(tmp_path):
    async def main():
        (tmp_path / "m" / "newest").mkdir(parents=True)
        with pytest.raises(ServingError, match=r"No model 'm' to load.*'newest' is not a version number"):
            await repository(tmp_path, backend=BACKEND).load("m")

    run(main())


def test_what_is_not_there_or_twice_there_is_named(tmp_path):
    with pytest.raises(HurtleError, match="does not exist"):
        repository(tmp_path / "none.onnx")
    (tmp_path / "a.test").write_text("")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.test").write_text("")
    with pytest.raises(HurtleError, match="Two models are called 'a'"):
        repository(tmp_path / "a.test", tmp_path / "b" / "a.test")
    (tmp_path / "a b.test").write_text("")
    with pytest.raises(HurtleError, match="cannot be a model's name"):
        repository(tmp_path / "a b.test")
