"""Cases `overlays` and `epochs`: what checkpoints with a domain's own disks cost, and whether a block is ever wrong.

The domain has four disks: its root, and three data disks. fio in the guest writes one of these at random places.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from rekindle_bench.case import NotPlannedError
from rekindle_lab.protector import Protector, protected

from .domains import LibvirtEnvironment
from .plan import Plan
from .rows import OVERLAYS, RAM_ONLY, UNPROTECTED, Row
from .serving import ServingDomain, served

IMAGE = "debian-cache"
"""It has fio."""
DATA_DISKS = ("raw", "qcow2", "raw")
MEMORY_MIB = 512
EVERY = "2s"
POLICIES = {RAM_ONLY: "crash-consistent", OVERLAYS: "overlays"}
"""How Rekindle treats the disks."""
FIO = "fio --name=x --bs=4096 --direct=1 --ioengine=psync --thread --output-format=json"
EPOCH_EVERY = "250ms"
VERIFIED_BYTES = 16 << 20
VERIFY = f"{FIO} --size={VERIFIED_BYTES} --rw=randwrite --randrepeat=0 --verify=crc32c --do_verify=1 --verify_fatal=1"


@contextmanager
def _protected(env: LibvirtEnvironment, domain: ServingDomain, how: str, every: str) -> Iterator[Protector | None]:
    """Protects the domain while the body runs, from its second checkpoint on. Afterwards its disks have no overlays."""
    if how == UNPROTECTED:
        yield None
        return
    store = env.store().fresh(domain.name)
    with (
        env.attached(domain),
        protected(env.domains, domain.name, store, every, None, "--disk", POLICIES[how]) as protector,
    ):
        protector.wait("checkpoint", 2)
        yield protector
        protector.stop()
    store.remove()


def overlays(env: LibvirtEnvironment, plan: Plan) -> None:
    """Lets the guest write a disk: unprotected, with checkpoints of its RAM, and with checkpoints of its disks too."""
    if plan.overlay_rounds == 0:
        raise NotPlannedError
    env.need(memory_mib=3 * MEMORY_MIB, disk_mib=8192)
    env.log("overlays: starting a domain")
    with served(
        env, "overlays", 32, image=IMAGE, mib=MEMORY_MIB, data_disks=DATA_DISKS, data_mib=plan.overlay_mib
    ) as domain:
        # What a disk has never had is written for the first time.
        _fio_writes(domain, f"--size={plan.overlay_mib << 20} --rw=write --bs=1048576")
        for round_number in range(plan.overlay_rounds):
            for how in (UNPROTECTED, RAM_ONLY, OVERLAYS):
                env.log(f"overlays: {how}: round {round_number + 1} of {plan.overlay_rounds}")
                with _protected(env, domain, how, EVERY) as protector:
                    options = (
                        f"--size={plan.overlay_mib << 20} --rw=randwrite --time_based --runtime={plan.overlay_write_s}"
                    )
                    row = _row("overlays", how, domain, round_number)
                    row.writes_per_s = _fio_writes(domain, options)
                    env.rows.append(row)
                    events = protector.of("checkpoint")[1:] if protector else []
                for event in events:
                    env.rows.append(_checkpoint(how, domain, round_number, event))


def _row(case: str, how: str, domain: ServingDomain, round_number: int) -> Row:
    return Row(case=case, how=how, memory_mib=domain.memory_mib, guests=1, round=round_number, vm=domain.name)


def _checkpoint(how: str, domain: ServingDomain, round_number: int, event: dict[str, object]) -> Row:
    row = _row("overlays", how, domain, round_number)
    steps = event["steps"]
    assert isinstance(steps, dict)
    row.number, row.stopped_us, row.disks_us = int(str(event["number"])), int(str(event["stopped_us"])), steps["disks"]
    row.steps = [{"step": name, "us": us} for name, us in steps.items()]
    return row


def _fio_writes(domain: ServingDomain, options: str) -> float:
    """Writes the first data disk, and returns the writes per second."""
    output = domain.run(f"{FIO} --filename={domain.data_device(0)} {options}")
    counters = json.loads(output[output.index("{") :])["jobs"][0]["write"]
    return counters["total_ios"] * 1000 / counters["runtime"]


def epochs(env: LibvirtEnvironment, plan: Plan) -> None:
    """Lets the guest write and verify a disk while checkpoints follow each other, and compares it after the merge."""
    if plan.epochs == 0:
        raise NotPlannedError
    env.need(memory_mib=3 * MEMORY_MIB, disk_mib=8192)
    env.log("epochs: starting a domain")
    with served(
        env, "epochs", 33, image=IMAGE, mib=MEMORY_MIB, data_disks=DATA_DISKS, data_mib=plan.overlay_mib
    ) as domain:
        devices = [domain.data_device(number) for number in range(len(DATA_DISKS))]
        for device in devices:
            # systemd-run, so that the loop survives the end of its ssh session.
            loop = (
                f"until [ -e /run/end ]; do {VERIFY} --filename={device} >/run/fio-out 2>&1 || echo bad >>/run/bad;"
                " echo pass >>/run/passes; done; echo end >>/run/ended"
            )
            domain.run(f"systemd-run --quiet sh -c '{loop}'")
        with _protected(env, domain, OVERLAYS, EPOCH_EVERY) as protector:
            assert protector is not None
            env.log(f"epochs: {plan.epochs} checkpoints")
            protector.wait("checkpoint", plan.epochs, timeout=60 + 3 * plan.epochs)
            domain.run(f"touch /run/end; until [ $(grep -c end /run/ended) = {len(devices)} ]; do sleep 0.2; done")
            before = _digests(domain, devices)
            number = len(protector.of("checkpoint"))
        row = _row("epochs", OVERLAYS, domain, 0)
        row.number = number
        row.passes = int(domain.run("grep -c pass /run/passes"))
        row.wrong = int(domain.run("cat /run/bad 2>/dev/null | wc -l"))
        row.wrong += sum(one != other for one, other in zip(before, _digests(domain, devices), strict=True))
        env.rows.append(row)


def _digests(domain: ServingDomain, devices: list[str]) -> list[str]:
    """Returns a digest of each disk as QEMU shows it now."""
    read = "dd bs=1M iflag=direct status=none if={} | sha256sum"
    return [domain.run(read.format(device)).strip() for device in devices]
