//! The limit of open files of this process (`RLIMIT_NOFILE`).

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// This process may not open enough files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "this command needs {needed} open files, and its limit is {limit} (RLIMIT_NOFILE); nothing was changed; raise the limit: \
     ulimit -n {needed}, or LimitNOFILE={needed} in its unit"
)]
pub struct TooFewDescriptors {
    needed: u64,
    limit: u64,
}

/// Returns how many files this process may have open.
#[must_use]
pub fn current() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Makes sure that this process may have `needed` files open: raises its limit if that is too low, up to the hard limit.
/// Processes that are started later inherit the limit.
///
/// # Errors
/// [`TooFewDescriptors`] if the hard limit is too low.
pub fn require(needed: u64) -> Result<(), TooFewDescriptors> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum });
    raised.map_err(|_| TooFewDescriptors { needed, limit: maximum.unwrap_or(u64::MAX) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_raised_as_far_as_possible() {
        let before = getrlimit(Resource::Nofile);
        let lowered = Rlimit { current: Some(100), maximum: before.maximum };
        setrlimit(Resource::Nofile, lowered).unwrap();
        require(90).unwrap();
        assert_eq!(current(), 100);
        require(110).unwrap();
        assert_eq!(current(), 110);
        // The hard limit can be lowered only once: nextest runs each test in a process of its own.
        setrlimit(Resource::Nofile, Rlimit { current: Some(110), maximum: Some(120) }).unwrap();
        let error = TooFewDescriptors { needed: 200, limit: 120 };
        let is_privileged = require(200).is_ok();
        assert!(is_privileged || require(200) == Err(error));
        assert!(error.to_string().contains("200 open files, and its limit is 120 (RLIMIT_NOFILE)"), "{error}");
    }
}
