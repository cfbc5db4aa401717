"""RootHammer's parameters (section 5.5: JBoss; sections 6.1 and 6.2: cluster), and results of the models for them."""

from rekindle_lab.models import throughput
from rekindle_lab.models.availability import availability
from rekindle_lab.models.parameters import ROOTHAMMER_CLUSTER, ROOTHAMMER_JBOSS

JBOSS, CLUSTER = ROOTHAMMER_JBOSS, ROOTHAMMER_CLUSTER


def availability_of(parameters, technique, timers=None):
    """Returns the availability (share of time, to 1) with a technique, at other timers than the paper's if given."""
    return availability(parameters.technique(technique), parameters.os, timers or parameters.timers)


def index_of(parameters, technique, hosts):
    """Returns section 6.3's performance index: throughput of `hosts` hosts as a share of that without renewals."""
    return throughput.index(parameters.technique(technique), parameters.os, parameters.timers, hosts)
