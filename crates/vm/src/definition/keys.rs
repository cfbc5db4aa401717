//! The keys that a definition may have.

/// Every key, by section. The getters may only read these keys, and hints at unknown keys are chosen from them.
pub(super) const SECTIONS: &[(&str, &[&str])] = &[
    (
        "",
        &[
            "name",
            "memory",
            "vcpus",
            "accel",
            "machine",
            "cpu",
            "qemu",
            "probe",
            "shutdown_timeout",
            "on_reboot",
            "on_crash",
            "save_dir",
            "qemu_args",
            "ram",
            "boot",
            "devices",
            "phase",
            "disk",
            "net",
        ],
    ),
    ("ram", &["dir", "prealloc"]),
    ("boot", &["kernel", "initrd", "append"]),
    ("devices", &["vga", "agent", "rng", "vmgenid"]),
    ("phase", &["save", "healthy"]),
    ("disk", &["id", "path", "format", "readonly", "cache", "serial", "server", "redo", "attic_keep", "bps", "iops"]),
    ("net", &["id", "mac", "kind", "forward", "bridge", "netns", "address", "ifname"]),
];
