"""Plans what to renew, how and when, from measured downtimes and a target (lab/README.md, "Plan").

`fleet` (the TOML file), `measured` (downtimes from files), `choose` (technique and intervals of each VM), `rolling`
(the order of hosts), `timers` (systemd units for the plan), `command`.
"""
