"""Makes stores of checkpoints: in a folder of the disk, encrypted, on a slow disk, in an object store.

`on_disk`, `encrypted`, `on_slow_disk` and `in_object_store` return a folder for stores; `Store.fresh`
returns the store of one VM in it.
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.slow import Limit, run, slow_disk

SLOW_BYTES_PER_S = 90_000_000
SLOW_OPERATIONS_PER_S = 120
"""With `SLOW_BYTES_PER_S`, the rates of the paper's hard drive."""
START_DEADLINE_S = 30.0
_numbers = itertools.count(1)
"""Numbers of the stores, so that no two have the same path."""


@dataclass(frozen=True)
class Bucket:
    """A bucket of an object store."""

    url: str
    variables: dict[str, str]
    """Variables with which a client reaches it."""

    def remove(self, url: str) -> None:
        """Removes the objects of the store at `url`."""
        prefix = url.removeprefix(f"{self.url}/") + "/"
        address = f"{self.variables['AWS_ENDPOINT_URL']}/{self.url.removeprefix('s3://')}"
        while keys := listed_keys(self._curl("GET", f"{address}?list-type=2&prefix={quote(prefix, safe='')}")):
            self._curl("DELETE", *(f"{address}/{quote(key)}" for key in keys))

    def _curl(self, method: str, *addresses: str) -> str:
        variables = self.variables
        credentials = f"{variables['AWS_ACCESS_KEY_ID']}:{variables['AWS_SECRET_ACCESS_KEY']}"
        options = ["--silent", "--show-error", "--fail", "--request", method, "--user", credentials]
        options += ["--aws-sigv4", f"aws:amz:{variables['AWS_REGION']}:s3"]
        options += ["--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
        if "AWS_CA_BUNDLE" in variables:
            options += ["--cacert", variables["AWS_CA_BUNDLE"]]
        return run("curl", *options, *addresses)


def listed_keys(answer: str) -> list[str]:
    """Returns the names of the objects in an answer to `ListObjectsV2`.

    >>> listed_keys('<R xmlns="x"><Contents><Key>a/1</Key></Contents><Contents><Key>a/2</Key></Contents></R>')
    ['a/1', 'a/2']
    """
    return [key.text or "" for key in ElementTree.fromstring(answer).iterfind("{*}Contents/{*}Key")]


@dataclass(frozen=True)
class Store:
    """One store, or a folder for several (`fresh`)."""

    kind: str
    """`disk`, `slow`, `encrypted`, `s3`."""
    url: str
    folder: Path
    """Folder of the store on this machine. A store in an object store has no files in it."""
    options: tuple[str, ...] = ()
    """Command options that the store's URL requires."""
    bucket: Bucket | None = None
    """The bucket of a store in an object store."""

    def fresh(self, name: str) -> "Store":
        """Returns a store named `name` in this folder, at a path that no store has had before.

        A host records in which store it protects a VM. If that store is missing, the host does not start another one at
        the same path.
        """
        name = f"{name}-{next(_numbers)}"
        return replace(self, url=f"{self.url}/{name}", folder=self.folder / name)

    def remove(self) -> None:
        """Removes the store."""
        if self.bucket is not None:
            self.bucket.remove(self.url)
        shutil.rmtree(self.folder, ignore_errors=True)

    def forget(self) -> None:
        """Drops the store's files from the machine's page cache, so that the next reader reads the disk."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                forget(path)


def forget(path: Path) -> None:
    """Drops a file from the machine's page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def on_disk(folder: Path) -> Store:
    """Returns a folder for stores on the machine's disk."""
    folder.mkdir(parents=True, exist_ok=True)
    return Store("disk", str(folder), folder)


def encrypted(rekindle: Rekindle, folder: Path) -> Store:
    """Returns a folder for encrypted stores on the machine's disk."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "store.key"
    rekindle.call("store", "new-key", str(key))
    return Store("encrypted", str(folder), folder, ("--key-file", str(key)))


@contextmanager
def on_slow_disk(folder: Path, size_mib: int = 6144) -> Iterator[Store]:
    """Makes a disk as slow as the paper's, on a file in `folder`."""
    with slow_disk(folder, size_mib) as slow:
        slow.limit_rates(Limit(SLOW_BYTES_PER_S, SLOW_OPERATIONS_PER_S))
        yield Store("slow", str(slow.folder), slow.folder)


@contextmanager
def in_object_store(programs: Path, folder: Path) -> Iterator[Store]:
    """Runs the object store of Rekindle's tests, which takes some seconds to start. Yields a bucket for stores.

    The objects are in memory, 2 GiB at most. `programs`: folder of Rekindle's built examples; `folder`: for the file
    with the credentials.
    """
    with subprocess.Popen(
        [str(programs / "object_store_server")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdin is not None and server.stdout is not None
            line = server.stdout.readline()
            if not line:
                raise RekindleError("the object store does not start; its output is above")
            started = json.loads(line)
            file = folder / f"object-store-{next(_numbers)}.env"
            file.touch(mode=0o600)
            file.write_text("".join(f"{name}={value}\n" for name, value in started["environment"].items()))
            bucket = Bucket(f"s3://{started['bucket']}", started["environment"])
            yield Store("s3", bucket.url, folder / "objects", ("--environment-file", str(file)), bucket)
        finally:
            # It ends with its input.
            if server.stdin is not None:
                server.stdin.close()
            server.wait(START_DEADLINE_S)
