"""Case `restored`: a domain is restored into a libvirt that does not know it, as on another host."""

from typing import Any

from rekindle_lab.guests import size
from rekindle_lab.protector import protected
from rekindle_lab.stores import Store

from .domains import Domain, LibvirtEnvironment, loaded, timed
from .plan import Plan
from .rows import INTO_LIBVIRT, Row

EVERY = "1s"
CHECKPOINTS = 3
URI_OPTIONS = ("--connect", "qemu:///system")


def restored(env: LibvirtEnvironment, plan: Plan) -> None:
    """Protects a domain, removes it, and restores it; appends a row for each restore."""
    for mib, rounds in plan.restores.items():
        env.need(memory_mib=4 * mib, disk_mib=4 * mib)
        for round_number in range(rounds):
            env.log(f"restored: {size(mib)}: round {round_number + 1} of {rounds}")
            domain = env.domain("restored", mib, 34)
            store = env.store().fresh(domain.name)
            with env.running(domain):
                boot = lose_host(env, domain, store)
                env.rows.append(_restored_row(env, domain, store, boot, round_number))
                env.domains.call("detach", domain.name)
            store.remove()


def lose_host(env: LibvirtEnvironment, domain: Domain, store: Store, *options: str) -> str:
    """Protects the domain, then removes it: neither libvirt nor a run directory remembers it. Returns the boot's id.

    `options` are those of `rekindle protect`.
    """
    # The kernel makes it up when it is read for the first time.
    boot = domain.command("boot-id")
    counted = ("--count", str(CHECKPOINTS), *options)
    with env.attached(domain):
        with (
            loaded(domain),
            protected(env.domains, domain.name, store, EVERY, None, *counted) as protector,
        ):
            protector.join()
        env.libvirt.destroy(domain.name)
    return boot


def restore(env: LibvirtEnvironment, domain: Domain, store: Store) -> tuple[dict[str, Any], int]:
    """Restores the domain into libvirt; returns what Rekindle reports, and the command's time in microseconds."""
    options = ("--store", store.url, *store.options, "--into-libvirt", "--preview", *URI_OPTIONS)
    return timed(lambda: env.domains.call("restore", domain.name, *options))


def _restored_row(env: LibvirtEnvironment, domain: Domain, store: Store, boot: str, round_number: int) -> Row:
    row = Row(
        case="restored", how=INTO_LIBVIRT, memory_mib=domain.memory_mib, guests=1, round=round_number, vm=domain.name
    )
    document, row.command_us = restore(env, domain, store)
    row.steps = document.get("steps", [])
    state = env.libvirt.virsh("domstate", domain.name).strip()
    domain.wait_ready()
    row.worked = state == "running" and domain.command("boot-id") == boot
    row.failure = "" if row.worked else f"libvirt: {state}"
    return row
