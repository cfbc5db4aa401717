#!/usr/bin/python3
"""Takes the place of a QEMU that an attacker controls: makes attempts, prints those that succeed, and becomes QEMU.

An attempt raises an error if it fails. None of them changes anything that a test needs.
"""
import ctypes
import os
import socket
import sys

QEMU = "{QEMU}"
VICTIM = int("{VICTIM_PID}") if "{VICTIM_PID}".isdigit() else 0
RUN = "{VICTIM_RUN}"
DISK = "{VICTIM_DISK}"
LIBC = ctypes.CDLL(None, use_errno=True)
ATTEMPTS = []


def attempt(function):
    ATTEMPTS.append(function)
    return function


def call(name, *arguments):
    """Calls a function of the C library, and raises its error."""
    if getattr(LIBC, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)


def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


@attempt
def read_secrets():
    open("/etc/shadow").read(1)


@attempt
def write_programs():
    os.close(os.open("/usr/bin/env", os.O_WRONLY))


@attempt
def write_configuration():
    os.close(os.open("/etc/hosts", os.O_WRONLY))


@attempt
def read_definition_of_other():
    open("{VICTIM_DEFINITION}").read(1)


@attempt
def read_disk_of_other():
    open(DISK, "rb").read(1)


@attempt
def write_disk_of_other():
    os.close(os.open(DISK, os.O_WRONLY))


@attempt
def read_state_of_other():
    open(os.path.join(RUN, "state.json")).read(1)


@attempt
def list_run_directory_of_other():
    os.listdir(RUN)


@attempt
def connect_to_qmp_of_other():
    connect(os.path.join(RUN, "vmm-1/watch.sock"))


@attempt
def connect_to_disk_server_of_other():
    connect(os.path.join(RUN, "disk-disk0.sock"))


@attempt
def control_disk_server_of_other():
    connect(os.path.join(RUN, "disk-disk0.control"))


@attempt
def signal_other():
    os.kill(VICTIM, 0)


@attempt
def signal_init():
    os.kill(1, 0)


@attempt
def read_memory_of_other():
    with open(f"/proc/{VICTIM}/maps") as maps:
        start = int(maps.readline().split("-")[0], 16)
    with open(f"/proc/{VICTIM}/mem", "rb") as memory:
        memory.seek(start)
        memory.read(1)


@attempt
def read_environment_of_other():
    open(f"/proc/{VICTIM}/environ", "rb").read(1)


@attempt
def become_root():
    call("setresuid", 0, 0, 0)


@attempt
def make_device_file():
    path = f"/tmp/rekindle-attempt-{os.getpid()}"
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    os.unlink(path)


@attempt
def open_raw_network():
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()


@attempt
def mount():
    os.makedirs("/tmp", exist_ok=True)
    call("mount", b"none", b"/tmp", b"tmpfs", 0, None)
    call("umount", b"/tmp")


@attempt
def write_kernel_parameter():
    os.close(os.open("/proc/sys/vm/overcommit_memory", os.O_WRONLY))


@attempt
def raise_own_priority():
    call("setpriority", 0, 0, -1)


def main():
    if "-pidfile" in sys.argv:
        for function in ATTEMPTS:
            try:
                function()
                print("reached", function.__name__, flush=True)
            except OSError:
                pass
        print("all attempts made", flush=True)
    os.execv(QEMU, [QEMU, *sys.argv[1:]])


main()
