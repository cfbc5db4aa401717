//! Ports of the host that QEMU's user networks forward to the guest. They are read from the running source, because
//! they can be added and removed while it runs, and no command line of a destination has them: the source has bound the
//! ports until it ends.

use rekindle_qemu::qmp::{Qmp, QmpError};
use rekindle_vm::journal::ForwardedPort;

/// Marks a forwarded port in the list of connections.
const MARK: &str = "[HOST_FORWARD]";

/// Returns the forwarded ports; an error names one that cannot be added to another QEMU.
pub(crate) fn list(qmp: &mut Qmp) -> Result<Result<Vec<ForwardedPort>, String>, QmpError> {
    Ok(parse(&qmp.human("info usernet")?))
}

/// Adds forwarded ports. Those that are there already stay.
pub(crate) fn add(qmp: &mut Qmp, ports: &[ForwardedPort]) -> Result<(), QmpError> {
    let present = list(qmp)?.unwrap_or_default();
    for port in ports.iter().filter(|port| !present.contains(port)) {
        let ForwardedPort { network, rule } = port;
        let answer = qmp.human(&format!("hostfwd_add {network} {rule}"))?;
        if !answer.trim().is_empty() {
            tracing::warn!("port forward {rule} of network {network}: {}", answer.trim());
        }
    }
    Ok(())
}

/// Reads the output of `info usernet`: for each network a line `Hub -1 (ID):`, and a line for each connection.
fn parse(text: &str) -> Result<Vec<ForwardedPort>, String> {
    let mut network = None;
    let mut ports = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(id) = line.strip_suffix("):").and_then(|start| Some(start.rsplit_once('(')?.1)) {
            network = Some(id.to_owned());
        }
        if !line.contains(MARK) {
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let protocol = words.first().and_then(|word| word.strip_suffix(MARK)).map(str::to_lowercase);
        match (protocol.as_deref(), words.as_slice(), &network) {
            (Some(protocol @ ("tcp" | "udp")), [_, _, host, port, guest, guest_port, ..], Some(network)) => {
                let host = if *host == "*" { "" } else { host };
                let rule = format!("{protocol}:{host}:{port}-{guest}:{guest_port}");
                ports.push(ForwardedPort { network: network.clone(), rule });
            }
            _ => return Err(format!("forwarded port `{line}`: Rekindle cannot add it to another QEMU")),
        }
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_ports_are_read() {
        let text = "Hub -1 (hostnet0):\r
  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r
  TCP[HOST_FORWARD]  18       127.0.0.1 17701       10.0.2.15  7000     0     0\r
  TCP[ESTABLISHED]   31       127.0.0.1 17701       10.0.2.15  7000     0     0\r
Hub -1 (net):\r
  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r
  UDP[HOST_FORWARD]  19               *  5353       10.0.2.15    53     0     0\r\n";
        let port = |network: &str, rule: &str| ForwardedPort { network: network.into(), rule: rule.into() };
        let expected = [port("hostnet0", "tcp:127.0.0.1:17701-10.0.2.15:7000"), port("net", "udp::5353-10.0.2.15:53")];
        assert_eq!(parse(text).unwrap(), expected);
        assert!(parse("Hub -1 (n):\n UNIX[HOST_FORWARD] 3 /run/s").unwrap_err().contains("/run/s"));
        assert_eq!(parse("").unwrap(), []);
    }
}
