"""Makes stores of checkpoints: in a folder of the disk, encrypted, on a slow disk, over TLS, in an object store.

`on_disk`, `encrypted`, `on_slow_disk`, `over_tls` and `in_object_store` return a folder for stores; `Store.fresh`
returns the store of one VM in it.
"""

import itertools
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.slow import Limit, run, slow_disk

SLOW_BYTES_PER_S = 90_000_000
SLOW_OPERATIONS_PER_S = 120
"""With `SLOW_BYTES_PER_S`, the rates of the paper's hard drive."""
START_DEADLINE_S = 30.0
_numbers = itertools.count(1)
"""Numbers of the stores, so that no two have the same path."""


@dataclass(frozen=True)
class Store:
    """One store, or a folder for several (`fresh`)."""

    kind: str
    """`disk`, `slow`, `tls`, `encrypted`, `s3`."""
    url: str
    folder: Path
    """Folder of the store on this machine. A store in an object store has no files in it."""
    options: tuple[str, ...] = ()
    """Command options that the store's URL requires."""

    def fresh(self, name: str) -> "Store":
        """Returns a store named `name` in this folder, at a path that no store has had before.

        A host records in which store it protects a VM. If that store is missing, the host does not start another one at
        the same path.
        """
        name = f"{name}-{next(_numbers)}"
        return replace(self, url=f"{self.url}/{name}", folder=self.folder / name)

    def remove(self) -> None:
        """Removes the store."""
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


def certificates(folder: Path) -> None:
    """Makes a certificate authority and certificates: `ca.pem`, `server.pem`, `client.pem`, each with a `.key` file."""
    folder.mkdir(parents=True, exist_ok=True)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    authority = folder / "ca.pem"
    named = ("-subj", "/CN=rekindle-bench", "-days", "2")
    run("openssl", "req", "-x509", *curve, "-keyout", folder / "ca.key", "-out", authority, *named)
    for role in ("server", "client"):
        extensions = folder / f"{role}.ext"
        extensions.write_text(
            "basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n"
            "extendedKeyUsage=serverAuth,clientAuth\n"
        )
        request = folder / f"{role}.csr"
        run("openssl", "req", "-new", *curve, "-keyout", folder / f"{role}.key", "-out", request, *named[:2])
        signed = ("-CA", authority, "-CAkey", folder / "ca.key", "-CAcreateserial", "-days", "2")
        run("openssl", "x509", "-req", "-in", request, *signed, "-extfile", extensions, "-out", folder / f"{role}.pem")


def _wait_listening(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RekindleError(f"store serve: {log.read_text()[-1000:]}") from None
            time.sleep(0.02)


@contextmanager
def over_tls(rekindle: Rekindle, folder: Path) -> Iterator[Store]:
    """Runs a store server on this machine's loopback, with its stores on the machine's disk."""
    keys, stores = folder / "keys", folder / "stores"
    certificates(keys)
    stores.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]
    command = [str(rekindle.binary), "store", "serve", "--listen", f"127.0.0.1:{port}", "--dir", str(stores)]
    command += ["--cert", str(keys / "server.pem"), "--key", str(keys / "server.key")]
    log = folder / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--client-ca", str(keys / "ca.pem")],
            env=rekindle.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        _wait_listening(server, port, log)
        files = {"--cert": "client.pem", "--key": "client.key", "--ca": "ca.pem"}
        client_options = tuple(word for option, name in files.items() for word in (option, str(keys / name)))
        yield Store("tls", f"tls://127.0.0.1:{port}", stores, client_options)
    finally:
        server.terminate()
        server.wait()


@dataclass(frozen=True)
class ObjectStore:
    """An object store that runs on this machine."""

    store: Store
    """The bucket, as a folder for stores."""
    variables: dict[str, str]
    """Variables with which a client reaches it."""


@contextmanager
def in_object_store(programs: Path, folder: Path) -> Iterator[ObjectStore]:
    """Runs the object store of Rekindle's tests, which takes some seconds to start.

    `programs`: folder of Rekindle's built examples; `folder`: for the file with the credentials.
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
            options = ("--environment-file", str(file))
            store = Store("s3", f"s3://{started['bucket']}", folder / "objects", options)
            yield ObjectStore(store, started["environment"])
        finally:
            # It ends with its input.
            if server.stdin is not None:
                server.stdin.close()
            server.wait(START_DEADLINE_S)
