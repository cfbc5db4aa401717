"""A fleet for the tests of plans: 6 hosts "web" with three VMs each, and 4 hosts "db" with one VM each.

The VMs of kind "gpu" allow no technique that meets the target availability, so the plan of this fleet has a problem.
"""

import tomllib

from rekindle_lab.plan.fleet import parse

TEXT = """
vmm_interval_max_d = 28
os_interval_max_d = 7
[target]
availability = 0.9999
capacity = 0.9
[vmm.warm]
vmm_downtime_s = 43
[vmm.saved]
vmm_downtime_s = 434
[vmm.cold]
vmm_downtime_s = 243
coupled = true
[os.cold]
downtime_s = 34
[os.kexec]
downtime_s = 20
[[hosts]]
name = "web"
count = 6
group = "web"
[[hosts.vms]]
name = "front"
count = 2
allow_os = ["cold"]
[[hosts.vms]]
name = "gpu"
allow_vmm = ["saved", "cold"]
allow_os = ["cold"]
[[hosts]]
name = "db"
count = 4
group = "db"
[[hosts.vms]]
name = "postgres"
"""


def vms_table(document, hosts, name):
    """Returns the table of the VMs `name` on the hosts `hosts` in a plan's TOML, for a test to change it."""
    hosts_table = next(table for table in document["hosts"] if table["name"] == hosts)
    return next(table for table in hosts_table["vms"] if table["name"] == name)


def fleet(text=TEXT, **changes):
    """Returns the fleet of a plan's TOML, with some of its top-level keys replaced."""
    return parse(tomllib.loads(text) | changes)
