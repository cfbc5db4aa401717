//! What libvirt has set up for a domain besides its QEMU, and what a replacement would lose: leases on its disks, limits and
//! places of its memory.

use crate::unprepared::LEASE_REMEDY;
use rekindle_libvirt::domains::CHARDEV_PREFIX;
use rekindle_qemu::takeover_command::PortEnd;
use roxmltree::Document;
use std::collections::BTreeMap;

/// Returns what a status file has that a replacement would not keep.
///
/// # Errors
/// If it is no XML.
pub(super) fn of_status(name: &str, status: &str) -> Result<Vec<String>, roxmltree::Error> {
    let document = Document::parse(status)?;
    let root = document.root_element();
    let mut problems = Vec::new();
    if root.children().any(|node| node.has_tag_name("lockstate")) {
        problems.push(format!("lock manager: libvirt has a lease for it; {LEASE_REMEDY}"));
    }
    let Some(domain) = root.children().find(|node| node.has_tag_name("domain")) else { return Ok(problems) };
    for (path, problem) in [
        (&["devices", "lease"][..], "leases are not passed on: start the domain without <lease>".to_owned()),
        (
            &["memtune"],
            format!(
                "limits of memory are not kept, and two copies of the RAM may exceed them: virsh memtune {name} --live \
                 --hard-limit -1 --soft-limit -1 --swap-hard-limit -1"
            ),
        ),
        (&["numatune"], "the place of its memory is not kept: start the domain without <numatune>".into()),
        (&["cputune", "cachetune"], "it is not kept: start the domain without <cachetune>".into()),
        (&["cputune", "memorytune"], "it is not kept: start the domain without <memorytune>".into()),
    ] {
        let found = path.iter().try_fold(domain, |node, name| node.children().find(|child| child.has_tag_name(*name)));
        if found.is_some() {
            problems.push(format!("<{}>: {problem}", path.last().unwrap_or(&"")));
        }
    }
    Ok(problems)
}

/// Returns the ports with a log file, of those that were plugged in. QEMU does not report the log file of a character device.
///
/// # Errors
/// If the status file is no XML.
pub(super) fn logs(status: &str, plugged: &BTreeMap<String, PortEnd>) -> Result<Vec<String>, roxmltree::Error> {
    let document = Document::parse(status)?;
    let logs = document.descendants().filter(|node| node.has_tag_name("log"));
    let aliases = logs.filter_map(|log| {
        let alias = log.parent()?.children().find(|node| node.has_tag_name("alias"))?;
        alias.attribute("name")
    });
    let plugged = aliases.filter(|alias| plugged.contains_key(&format!("{CHARDEV_PREFIX}{alias}")));
    let problem = |alias| {
        format!("the log file of device {alias}, which was plugged in, is not kept: start the domain with the device")
    };
    Ok(plugged.map(problem).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(inside: &str) -> Vec<String> {
        let status = format!("<domstatus state='running'>{inside}</domstatus>");
        of_status("web", &status).unwrap()
    }

    #[test]
    fn log_files_of_plugged_ports_are_named() {
        let port = |alias: &str, log: &str| format!("<channel>{log}<alias name='{alias}'/></channel>");
        let log = "<log file='/var/log/port'/>";
        let devices = [port("channel0", log), port("channel1", ""), port("channel2", log)].concat();
        let status = format!("<domstatus><domain><devices>{devices}</devices></domain></domstatus>");
        let plugged = ["charchannel1", "charchannel2"].map(|id| (id.to_owned(), PortEnd::Pty)).into();
        let found = logs(&status, &plugged).unwrap();
        assert!(found.len() == 1 && found[0].contains("channel2"), "{found:?}");
    }

    #[test]
    fn leases_and_limits_are_named() {
        assert_eq!(problems("<domain><devices/><cputune><shares>7</shares></cputune></domain>"), Vec::<String>::new());
        let cases = [
            ("<lockstate>4:/images</lockstate><domain/>", "lock manager"),
            ("<domain><devices><lease><key>k</key></lease></devices></domain>", "<lease>"),
            ("<domain><memtune><hard_limit unit='KiB'>9</hard_limit></memtune></domain>", "virsh memtune web"),
            ("<domain><numatune><memory mode='strict' nodeset='0'/></numatune></domain>", "<numatune>"),
            ("<domain><cputune><cachetune vcpus='0'/></cputune></domain>", "<cachetune>"),
        ];
        for (inside, expected) in cases {
            let found = problems(inside);
            assert!(found.len() == 1 && found[0].contains(expected), "{inside}: {found:?}");
        }
    }
}
