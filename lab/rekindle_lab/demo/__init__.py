"""What `make demo` measures and draws: the VMM replaced under a guest, and the guest rebooted."""
