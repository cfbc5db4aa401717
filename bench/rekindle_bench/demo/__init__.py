"""Measurements and drawings of `make demo`: the VMM replaced under a guest, and the guest rebooted."""
