"""Stores of checkpoints for experiments: each has a path of its own, and a store over TLS has certificates."""

import subprocess

import pytest

from rekindle_lab.stores import certificates, on_disk


@pytest.mark.parametrize("role", ["server", "client"])
def test_certificates_are_signed_by_their_authority(tmp_path, role):
    certificates(tmp_path)
    command = ["openssl", "verify", "-CAfile", str(tmp_path / "ca.pem"), str(tmp_path / f"{role}.pem")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_two_stores_of_one_name_have_different_paths(tmp_path):
    stores = on_disk(tmp_path / "stores")
    store, other = stores.fresh("one"), stores.fresh("one")
    assert store.url == f"{stores.url}/{store.folder.name}" and store.folder.parent == stores.folder
    assert store.url != other.url and store.folder != other.folder


def test_a_store_can_be_removed_alone(tmp_path):
    store = on_disk(tmp_path / "stores").fresh("one")
    store.folder.mkdir()
    (store.folder / "segment").write_bytes(b"x")
    store.forget()
    store.remove()
    assert not store.folder.exists()
