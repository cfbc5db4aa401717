"""The command line of the peer `cpr-transfer`, by which QEMU replaces itself.

The peer runs the same virtual hardware as a VM of Rekindle, so its command line is made from that VM's.
"""

import itertools
import json
from pathlib import Path

from rekindle_lab.peers.cpr import arguments

REKINDLE_COMMAND_LINE = [
    "/usr/bin/qemu-system-x86_64",
    *("-name", "guest=web,debug-threads=on", "-nodefaults", "-pidfile", "/run/a/1/qemu.pid"),
    *("-machine", "pc-q35-10.0,memory-backend=ram,suppress-vmdesc=on"),
    *("-global", "migration.send-configuration=off", "-global", "ICH9-LPC.disable_s3=1"),
    *("-object", "memory-backend-file,id=ram,size=512,mem-path=/ram/web.ram,share=on,prealloc=off"),
    *("-chardev", "socket,id=console,path=/run/a/1/console.sock,server=on,wait=off,logfile=/run/a/console.log"),
    *("-append", "console=ttyS0 quiet"),
    *("-blockdev", '{"driver": "file", "filename": "/disks/web.raw"}'),
    *("-netdev", "tap,id=net0,fd=40,vhost=off", "-device", '{"driver": "virtio-net-pci", "netdev": "net0"}'),
    *("-incoming", "defer", "-S"),
]
PEER_PATHS = {
    "/run/a/1": "/peer/3",
    "/run/a/console.log": "/peer/log",
    "/ram/web.ram": "/ram/p",
    "/disks/web.raw": "/d/p",
}


def test_the_peer_has_our_hardware_and_its_own_files():
    """Each path of the VM becomes one of the peer (`PEER_PATHS`), the tap's descriptor 40 becomes 7.

    `aux-ram-share=on` is added: cpr-transfer then keeps the small RAM blocks in place, too, as Rekindle does.
    """
    peer_arguments = arguments(REKINDLE_COMMAND_LINE, paths=PEER_PATHS, tap_fds={40: 7}, incoming=None)
    text = " ".join(peer_arguments)
    assert peer_arguments[0] == "-name"
    assert "pc-q35-10.0,memory-backend=ram,suppress-vmdesc=on,aux-ram-share=on" in peer_arguments
    assert "memory-backend-file,id=ram,size=512,mem-path=/ram/p,share=on,prealloc=off" in peer_arguments
    assert "path=/peer/3/console.sock" in text and "logfile=/peer/log" in text
    assert '"filename": "/d/p"' in text
    assert "tap,id=net0,fd=7,vhost=off" in peer_arguments
    assert "ICH9-LPC.disable_s3=1" in peer_arguments
    assert "console=ttyS0 quiet" in peer_arguments
    for rekindle_only in ("send-configuration", "-incoming", "-S", "/run/a", "/ram/web.ram", "/disks"):
        assert rekindle_only not in text


def test_the_destination_waits_at_the_cpr_channel():
    peer_arguments = arguments(
        REKINDLE_COMMAND_LINE, paths=PEER_PATHS, tap_fds={40: 7}, incoming=Path("/peer/3/cpr.sock")
    )
    main_channel, cpr_channel = (value for option, value in itertools.pairwise(peer_arguments) if option == "-incoming")
    assert main_channel == "defer"  # QEMU waits for the QMP command `migrate-incoming`
    channel = json.loads(cpr_channel)
    assert channel["channel-type"] == "cpr"
    assert channel["addr"]["path"] == "/peer/3/cpr.sock"
