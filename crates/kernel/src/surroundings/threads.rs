//! Scheduling and cgroups of single threads. A manager pins the threads of a QEMU by what they do: each virtual CPU,
//! each I/O thread, and all others.

use super::EnvironmentError;
use super::action::{Action, Step};
use super::cgroup::{self, Membership};
use super::proc_file::ProcDirectory;
use crate::process::Process;
use crate::sched;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;
use std::io;

/// What a thread does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum ThreadRole {
    /// Runs the virtual CPU of this index.
    #[error("thread of virtual CPU {0}")]
    Vcpu(u32),
    /// Runs the I/O thread of this id.
    #[error("I/O thread {0:?}")]
    IoThread(String),
    /// The main thread and those that help it.
    #[error("main thread")]
    Other,
}

/// A thread and its role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleThread {
    /// What the thread does.
    pub role: ThreadRole,
    /// Its number.
    pub thread: u32,
}

/// Scheduling of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scheduling {
    affinity: CpuSet,
    policy: libc::c_int,
    priority: libc::c_int,
    nice: libc::c_int,
}

impl Scheduling {
    pub fn of(thread: u32) -> io::Result<Self> {
        let number = number(thread)?;
        Ok(Self {
            affinity: sched_getaffinity(Pid::from_raw(number))?,
            policy: sched::policy(number)?,
            priority: sched::priority(number)?,
            nice: sched::nice(number)?,
        })
    }

    /// Appends the actions that give the calling thread this scheduling.
    pub fn add_actions(self, actions: &mut Vec<Action>) {
        let Self { affinity, policy, priority, nice } = self;
        actions.push(Action::new(Step::Affinity, move || Ok(sched_setaffinity(None, &affinity)?)));
        actions.push(Action::new(Step::Scheduling, move || sched::set_policy(0, policy, priority)));
        actions.push(Action::new(Step::Nice, move || sched::set_nice(0, nice)));
    }

    fn apply(&self, thread: u32) -> io::Result<()> {
        let number = number(thread)?;
        sched_setaffinity(Pid::from_raw(number), &self.affinity)?;
        sched::set_policy(number, self.policy, self.priority)?;
        sched::set_nice(number, self.nice)
    }
}

fn number(thread: u32) -> io::Result<libc::pid_t> {
    // 0 would be the calling thread.
    let number = libc::pid_t::try_from(thread).ok().filter(|&number| number > 0);
    number.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

#[derive(Debug)]
struct ThreadPlace {
    scheduling: Scheduling,
    cgroups: Vec<Membership>,
}

/// Cgroups, CPU affinity, scheduling policy and priority of the threads of a process, by role.
#[derive(Debug)]
pub struct ThreadPlaces(BTreeMap<ThreadRole, ThreadPlace>);

impl ThreadPlaces {
    /// Reads the places of threads of `source`. Of several threads of one role the first counts.
    ///
    /// # Errors
    /// When a thread has ended.
    pub fn of(source: Process, threads: &[RoleThread]) -> Result<Self, EnvironmentError> {
        let mut places = BTreeMap::new();
        for RoleThread { role, thread } in threads {
            if places.contains_key(role) {
                continue;
            }
            let directory = ProcDirectory::of_thread(source.pid, *thread);
            let scheduling = Scheduling::of(*thread).map_err(|e| directory.error("stat", e))?;
            places.insert(role.clone(), ThreadPlace { scheduling, cgroups: cgroup::memberships(&directory)? });
        }
        if source.is_alive() { Ok(Self(places)) } else { Err(EnvironmentError::Ended { pid: source.pid }) }
    }

    /// Gives each thread of `destination` the place of its role. A thread that has ended meanwhile is no error.
    /// Repeating the call has no effect.
    ///
    /// # Errors
    /// [`EnvironmentError::UnknownRole`], before anything is changed; [`EnvironmentError::Place`] names the thread that
    /// cannot be placed, and the threads before it stay placed.
    pub fn apply(&self, destination: Process, threads: &[RoleThread]) -> Result<(), EnvironmentError> {
        let find =
            |role: &ThreadRole| self.0.get(role).ok_or_else(|| EnvironmentError::UnknownRole { role: role.clone() });
        let placed: Vec<_> =
            threads.iter().map(|thread| Ok((thread, find(&thread.role)?))).collect::<Result<_, _>>()?;
        for (thread, place) in placed {
            match place.apply(destination, thread) {
                Err(_) if !ProcDirectory::of_thread(destination.pid, thread.thread).exists() => {}
                result => result?,
            }
        }
        if destination.is_alive() { Ok(()) } else { Err(EnvironmentError::Ended { pid: destination.pid }) }
    }
}

impl ThreadPlace {
    fn apply(&self, process: Process, RoleThread { role, thread }: &RoleThread) -> Result<(), EnvironmentError> {
        let (pid, thread) = (process.pid, *thread);
        let failed = |source| EnvironmentError::Place { pid, thread, role: role.clone(), source };
        // Also proves that the thread is one of this process.
        let present = cgroup::memberships(&ProcDirectory::of_thread(pid, thread))?;
        for place in cgroup::places_not_among(&self.cgroups, &present)? {
            place.move_thread(thread).map_err(failed)?;
        }
        // After the cgroups: a cpuset changes the affinity.
        self.scheduling.apply(thread).map_err(failed)
    }
}
