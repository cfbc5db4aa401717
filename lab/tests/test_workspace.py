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
    workspace = Workspace(binary, tmp_path / "work", tmp_path / "disk", namespaces=("rkx-there-is-none",))
    for folder in (workspace.work / "run", workspace.disk):
        folder.mkdir(parents=True)
    return workspace


def add_vm(space, run_dir, name):
    """Makes the record of a VM, as Rekindle leaves it in a run directory."""
    folder = space.work / run_dir / name
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")


def test_its_names_are_read_again(space):
    """Its `leftovers` are recorded as JSON; older records have one namespace instead of a list."""
    assert Workspace.from_leftovers(space.binary, space.leftovers) == space
    assert Workspace.from_leftovers(space.binary, {**space.leftovers, "netns": "one"}).namespaces == ("one",)


def test_the_vms_of_all_run_directories_are_stopped(space, tmp_path):
    add_vm(space, "run", "web")
    add_vm(space, "there", "db")
    # Rekindle's own folders in a run directory are not VMs.
    add_vm(space, "run", ".binaries")
    space.remove()
    calls = {line.split(maxsplit=1)[1] for line in (tmp_path / "calls").read_text().splitlines()}
    assert calls == {"stop web --now --json", "stop db --now --json"}
    assert not space.work.exists() and not space.disk.exists()
    space.remove()  # may be repeated


def test_nothing_is_removed_while_a_vm_cannot_be_stopped(space, tmp_path):
    """A process of the run is alive, and `rekindle` fails: the VM's files may still be in use."""
    add_vm(space, "run", "web")
    (tmp_path / "fails").touch()
    process_of_run = subprocess.Popen(["sleep", "1000"], env={**os.environ, "WORKS_IN": str(space.work)})
    try:
        with pytest.raises(RekindleError, match="processes of a killed run cannot be ended"):
            space.remove()
        assert space.work.exists() and space.disk.exists()
    finally:
        process_of_run.kill()
        process_of_run.wait()


def test_only_processes_left_by_a_kill_are_ended(space):
    run_dirs = [space.work / "run", space.work / "run-2"]  # the second is not a folder of this workspace
    of_this_run, of_another_run = (
        subprocess.Popen(["sleep", "1000"], env={**os.environ, "REKINDLE_RUN_DIR": str(run_dir)})
        for run_dir in run_dirs
    )
    try:
        space.remove()
        assert of_this_run.wait(timeout=30) == -signal.SIGKILL
        assert of_another_run.poll() is None
    finally:
        for process in (of_this_run, of_another_run):
            process.kill()
            process.wait()
