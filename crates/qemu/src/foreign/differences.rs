//! Differences between a command line and the machine as it is now: devices that were plugged in or unplugged, and disks
//! that show another image.

use super::CurrentDisk;
use crate::adopt::Obstacle;
use crate::options::Options;
use std::collections::BTreeSet;

/// Reports the differences between the devices of a command line and the ids of the current ones.
pub(crate) fn device_differences(given: &[Options], current: &BTreeSet<String>) -> Vec<Obstacle> {
    let named: BTreeSet<String> = given.iter().filter_map(|device| device.get("id")).collect();
    let obstacle = |id: &String, why: &str| Obstacle { what: format!("device {id}"), why: why.into() };
    let plugged = "it was plugged in while the guest ran, and is not on its command line: unplug it, or start the VM \
                   with it";
    let unplugged = "it was unplugged while the guest ran: start the VM without it";
    let mut obstacles: Vec<_> = current.difference(&named).map(|id| obstacle(id, plugged)).collect();
    obstacles.extend(named.difference(current).map(|id| obstacle(id, unplugged)));
    obstacles
}

/// Reports the disks that show a block node other than the one on the command line. `nodes` are the names of the nodes
/// on the command line.
pub(crate) fn disk_differences(given: &[Options], nodes: &BTreeSet<String>, current: &[CurrentDisk]) -> Vec<Obstacle> {
    let mut obstacles = Vec::new();
    for device in given {
        let (Some(id), Some(given_node)) = (device.get("id"), device.get("drive")) else { continue };
        let disk = current.iter().find(|disk| disk.device.split('/').any(|part| part == id));
        let Some(current_node) = disk.map(|disk| &disk.node).filter(|node| **node != given_node) else { continue };
        if nodes.contains(&given_node) {
            let why = format!(
                "the command line gives it {given_node}, but it shows {current_node} now (a snapshot or another \
                 medium): start the VM with that"
            );
            obstacles.push(Obstacle { what: format!("disk {id}"), why });
        }
    }
    obstacles
}
