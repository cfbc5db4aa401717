"""The folders of a run: VMs in them are stopped, processes that a kill has left end, and everything is removed."""

import os
import signal
import subprocess

import pytest

from rekindle_lab.rekindle import RekindleError
from rekindle_lab.runs.workspace import Workspace


@pytest.fixture
def space(tmp_path):
    """Returns a workspace whose `rekindle` lists its calls in a file, and fails if a file `fails` is next to it."""
    binary = tmp_path / "rekindle"
    binary.write_text(
        f'#!/bin/sh\necho "$REKINDLE_RUN_DIR $*" >>{tmp_path}/calls\n[ ! -e {tmp_path}/fails ] && echo "{{}}"\n'
    )
    binary.chmod(0o755)
    made = Workspace(binary, tmp_path / "work", tmp_path / "disk", ("rkx-there-is-none",))
    for folder in (made.work / "run", made.disk):
        folder.mkdir(parents=True)
    return made


def add_vm(space, run_dir, name):
    folder = space.work / run_dir / name
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")


def test_its_names_are_read_again(space):
    assert Workspace.from_leaves(space.binary, space.leaves) == space
    assert Workspace.from_leaves(space.binary, {**space.leaves, "netns": "one"}).namespaces == ("one",)


def test_the_vms_of_all_run_directories_are_stopped(space, tmp_path):
    add_vm(space, "run", "web")
    add_vm(space, "there", "db")
    # Rekindle's own folders in a run directory are not VMs.
    add_vm(space, "run", ".binaries")
    space.remove()
    calls = {line.split(maxsplit=1)[1] for line in (tmp_path / "calls").read_text().splitlines()}
    assert calls == {"stop web --now --json", "stop db --now --json"}
    assert not space.work.exists() and not space.disk.exists()
    space.remove()


def test_nothing_is_removed_while_a_vm_cannot_be_stopped(space, tmp_path):
    add_vm(space, "run", "web")
    (tmp_path / "fails").touch()
    works_in_it = subprocess.Popen(["sleep", "1000"], env={**os.environ, "WORKS_IN": str(space.work)})
    try:
        with pytest.raises(RekindleError, match="processes of a killed run cannot be ended"):
            space.remove()
        assert space.work.exists() and space.disk.exists()
    finally:
        works_in_it.kill()
        works_in_it.wait()


def test_only_processes_left_by_a_kill_are_ended(space):
    mine, other = ({**os.environ, "REKINDLE_RUN_DIR": str(space.work / name)} for name in ("run", "run-2"))
    left = subprocess.Popen(["sleep", "1000"], env=mine)
    stays = subprocess.Popen(["sleep", "1000"], env=other)
    try:
        space.remove()
        assert left.wait(timeout=30) == -signal.SIGKILL
        assert stays.poll() is None
    finally:
        for process in (left, stays):
            process.kill()
            process.wait()
