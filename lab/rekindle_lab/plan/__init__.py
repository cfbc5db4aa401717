"""Plans what to renew, how and when, from measured downtimes and a target (lab/README.md, "Plan").

To renew is to reboot a VMM or an OS before it fails of what it has accumulated while it ran.

`fleet` (the TOML file), `measured` (downtimes from files), `choose` (technique and intervals of each VM), `rolling`
(the order of hosts), `timers` (systemd units for the plan), `command`.
"""
