"""Measurements and drawings of `make demo`: the VMM (QEMU) replaced under a guest, and the guest rebooted.

`vmm` draws the replacements that `scripts/demo` has measured, `web` measures and draws the reboots, and `plan` computes
from both how often to renew the VMM and the guest's OS.
"""
