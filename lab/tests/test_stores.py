"""Stores of checkpoints for experiments: each has a path of its own, and can be removed alone."""

from rekindle_lab.stores import Bucket, Store, on_disk


def test_two_stores_of_one_name_have_different_paths(tmp_path):
    stores = on_disk(tmp_path / "stores")
    store, other = stores.fresh("one"), stores.fresh("one")
    assert store.url == f"{stores.url}/{store.folder.name}" and store.folder.parent == stores.folder
    assert store.url != other.url and store.folder != other.folder


class RecordingBucket(Bucket):
    """A bucket without a server, which has these objects."""

    def _curl(self, method, *addresses):
        start, objects = "http://host/checkpoints", self.variables["objects"]
        if method == "GET":
            assert addresses == (f"{start}?list-type=2&prefix=web-1%2F",)
            keys = [name for name in objects if name.startswith("web-1/")]
            return "<R>" + "".join(f"<Contents><Key>{key}</Key></Contents>" for key in keys) + "</R>"
        assert method == "DELETE"
        for address in addresses:
            objects.remove(address.removeprefix(f"{start}/"))
        return ""


def test_a_store_in_an_object_store_can_be_removed_alone(tmp_path):
    objects = ["web-1/log/1", "web-1/segments/1-1", "web-10/log/1"]
    bucket = RecordingBucket("s3://checkpoints", {"AWS_ENDPOINT_URL": "http://host", "objects": objects})
    Store("s3", f"{bucket.url}/web-1", tmp_path / "objects", (), bucket).remove()
    assert objects == ["web-10/log/1"]


def test_a_store_can_be_removed_alone(tmp_path):
    store = on_disk(tmp_path / "stores").fresh("one")
    store.folder.mkdir()
    (store.folder / "segment").write_bytes(b"x")
    store.forget()
    store.remove()
    assert not store.folder.exists()
