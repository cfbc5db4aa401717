//! The pid file of a QEMU (`-pidfile`). The destination does not write it: the source has it locked. Its command line names
//! it nevertheless, so that the next replacement finds it: in the id of a character device to which nothing is connected.

use super::OWN_ID_PREFIX;

const NAME: &str = "pidfile-";

/// Returns the option that names the pid file `path`.
pub(super) fn option(path: &str) -> String {
    let digits: String = path.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("null,id={OWN_ID_PREFIX}{NAME}{digits}")
}

/// Returns the path that a character device's id names; `None` if it names none.
pub(super) fn of_id(id: &str) -> Option<String> {
    let digits = id.strip_prefix(OWN_ID_PREFIX)?.strip_prefix(NAME)?.as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.chunks(2).map(byte).collect();
    String::from_utf8(bytes?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_found_again() {
        let path = "/run/vm ,=\u{fc}.pid";
        let option = option(path);
        let id = option.strip_prefix("null,id=").unwrap();
        assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'), "{id}");
        assert_eq!(of_id(id).as_deref(), Some(path));
        assert_eq!(of_id("rekindle-pidfile-zz"), None);
        assert_eq!(of_id("rekindle-7-qmp"), None);
    }
}
