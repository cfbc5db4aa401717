//! The descriptors of the destination: which the source's command line names, which of the source's are needed besides
//! these, and the numbers of new ones. The *source* is the QEMU that runs the guest, the *destination* the one that takes
//! it over ([`super`]).

use super::{Descriptor, ListenAddress, SourceDescriptor};
use crate::foreign::CommandOption;
use crate::options::Options;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::RawFd;

/// Keys whose value is one descriptor, or several with colons between them.
const DESCRIPTOR_KEYS: [&str; 4] = ["fd", "fds", "vhostfd", "vhostfds"];

/// Descriptors of the destination while its command line is rewritten.
pub(super) struct Numbers<'a> {
    open: &'a BTreeMap<RawFd, SourceDescriptor>,
    destination: BTreeMap<RawFd, Descriptor>,
    /// Descriptors of the source that an option has already.
    claimed: BTreeSet<RawFd>,
    /// Neither the source nor its command line uses this number or a higher one.
    next_free: RawFd,
}

impl<'a> Numbers<'a> {
    pub(super) fn new(open: &'a BTreeMap<RawFd, SourceDescriptor>, options: &[CommandOption<'_>]) -> Self {
        let named: BTreeSet<RawFd> = options.iter().flat_map(named_numbers).collect();
        let highest = named.last().max(open.last_key_value().map(|(number, _)| number)).copied().unwrap_or(0);
        // 0, 1 and 2 are the standard ones.
        let next_free = highest.max(2).saturating_add(1);
        Self { open, destination: BTreeMap::new(), claimed: named, next_free }
    }

    /// Returns what the source has open at `number`.
    pub(super) fn source(&self, number: RawFd) -> Option<&'a SourceDescriptor> {
        self.open.get(&number)
    }

    /// Puts `descriptor` at the number that the command line names.
    pub(super) fn put(&mut self, number: RawFd, descriptor: Descriptor) {
        self.destination.insert(number, descriptor);
    }

    /// Puts `descriptor` at an unused number, which is returned.
    pub(super) fn put_new(&mut self, descriptor: Descriptor) -> RawFd {
        let number = self.next_free;
        self.next_free = self.next_free.saturating_add(1);
        self.destination.insert(number, descriptor);
        number
    }

    /// Claims the only listening socket of the source that `is_wanted`. `None` if there is not exactly one.
    pub(super) fn claim_listener(&mut self, is_wanted: impl Fn(&ListenAddress) -> bool) -> Option<RawFd> {
        let is_wanted = |descriptor: &SourceDescriptor| match descriptor {
            SourceDescriptor::Listener(address) => is_wanted(address),
            _ => false,
        };
        let unclaimed = self.open.iter().filter(|(number, _)| !self.claimed.contains(number));
        let mut matching = unclaimed.filter(|(_, descriptor)| is_wanted(descriptor)).map(|(number, _)| *number);
        match (matching.next(), matching.next()) {
            (Some(source), None) => {
                self.claimed.insert(source);
                Some(self.put_new(Descriptor::Listener { source }))
            }
            _ => None,
        }
    }

    /// Puts a listening socket of the source that `is_wanted` at an unused number, which is returned. All that are wanted
    /// are the same socket: an earlier replacement has left a second descriptor of it.
    pub(super) fn put_listener(&mut self, is_wanted: impl Fn(&ListenAddress) -> bool) -> Option<RawFd> {
        let is_wanted = |descriptor: &SourceDescriptor| match descriptor {
            SourceDescriptor::Listener(address) => is_wanted(address),
            _ => false,
        };
        let mut unclaimed = self.open.iter().filter(|(number, _)| !self.claimed.contains(number));
        let (source, _) = unclaimed.find(|(_, descriptor)| is_wanted(descriptor))?;
        Some(self.put_new(Descriptor::Duplicate { source: *source }))
    }

    /// Puts a listening socket of the source as [`Self::put_listener`] does. `None` also if the wanted sockets have several
    /// addresses.
    pub(super) fn put_only_listener(&mut self, is_wanted: impl Fn(&ListenAddress) -> bool) -> Option<RawFd> {
        let mut wanted = self.open.iter().filter_map(|(number, descriptor)| match descriptor {
            SourceDescriptor::Listener(address) if !self.claimed.contains(number) && is_wanted(address) => {
                Some(address)
            }
            _ => None,
        });
        let address = wanted.next()?;
        if wanted.any(|other| other != address) {
            return None;
        }
        self.put_listener(|bound| bound == address)
    }

    /// Claims all queues of a tap that the source has open, and returns their numbers in the destination.
    pub(super) fn claim_tap(&mut self, interface: &str) -> Vec<RawFd> {
        let is_queue = |(number, descriptor): &(&RawFd, &SourceDescriptor)| {
            let is_tap = matches!(descriptor, SourceDescriptor::Tap { interface: name } if name == interface);
            is_tap && !self.claimed.contains(number)
        };
        let sources: Vec<_> = self.open.iter().filter(is_queue).map(|(number, _)| *number).collect();
        self.claimed.extend(&sources);
        let queue = |source| Descriptor::Tap { source, interface: interface.to_owned() };
        sources.into_iter().map(|source| self.put_new(queue(source))).collect()
    }

    /// Returns how many vhost devices the source has open that its command line does not name.
    pub(super) fn unnamed_vhosts(&self) -> usize {
        let is_vhost = |(number, descriptor): &(&RawFd, &SourceDescriptor)| {
            **descriptor == SourceDescriptor::VhostNet && !self.claimed.contains(number)
        };
        self.open.iter().filter(is_vhost).count()
    }

    pub(super) fn into_destination(self) -> BTreeMap<RawFd, Descriptor> {
        self.destination
    }
}

/// Returns the descriptors that an option names.
fn named_numbers(option: &CommandOption<'_>) -> Vec<RawFd> {
    let Some(options) = option.value.and_then(|value| Options::parse(value, "implied").ok()) else { return Vec::new() };
    let values = DESCRIPTOR_KEYS.iter().filter_map(|key| options.get(key));
    values.flat_map(|value| value.split(':').filter_map(|number| number.parse().ok()).collect::<Vec<_>>()).collect()
}
