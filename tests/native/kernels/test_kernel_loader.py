"""The kernels run from a copy that is named by its content."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hurtle.native import kernel_loader


def test_the_copy_is_what_runs_and_is_loaded_once():
    kernels = kernel_loader.load_kernels()
    assert kernel_loader.load_kernels() is kernels
    copies = {Path(file).name for file in Path(kernels.__path__[0]).glob("*.py")}
    assert copies == {file.name for file in kernel_loader.SOURCE.glob("*.py")}
    assert Path(kernels.gemm.__file__).parent != kernel_loader.SOURCE


def test_another_text_another_width_or_mode_is_another_folder(tmp_path, monkeypatch):
    source = tmp_path / "kernels"
    shutil.copytree(kernel_loader.SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted(source.glob("*.py"))
    before = kernel_loader._digest(files)
    (source / "gemm.py").write_text((source / "gemm.py").read_text() + "\n# changed\n")
    assert kernel_loader._digest(files) != before


def test_two_processes_that_start_together_both_find_it(tmp_path):
    code = "from hurtle.native.kernel_loader import load_kernels; print(load_kernels().__name__)"
    env = {**os.environ, "HURTLE_CACHE_DIR": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = {process.communicate(timeout=60)[0].strip() for process in both}
    assert len(names) == 1
    assert [folder.name for folder in tmp_path.iterdir()] == list(names)  # nothing half-made is left
