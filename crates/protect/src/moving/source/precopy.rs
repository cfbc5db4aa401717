//! Takes checkpoints of a guest that is to be moved while it runs, until few pages are left for the final pause.
//! Meanwhile the destination host starts a QEMU, and reads the data of the newest checkpoint that a load needs.
//!
//! The *source* is the host that the guest leaves, and the *destination* the host that it continues on. The *final
//! pause* is the time between the stop of the guest on one and its start on the other.

use super::unexpected;
use crate::error::{CheckpointError, TrackingStartError};
use crate::fill::is_served;
use crate::moving::protocol::{Answer, Message};
use crate::moving::remote::Connection;
use crate::moving::{MoveError, MoveEvent, Round};
use crate::protector::{CheckpointSeries, ProtectSettings};
use crate::session::TrackingSession;
use crate::target::Target;
use rekindle_life::attach::ProtectionLock;
use rekindle_pages::PageRun;
use rekindle_vm::fault;
use rekindle_vm::host::Host;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long the destination host may take to start a QEMU, or to read the data of a checkpoint that a load needs.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(300);
/// How long a move waits for the memory of a guest that was just restored.
const FILL_TIMEOUT: Duration = Duration::from_secs(300);
const FILL_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Checkpoints while the guest runs end when one has no more dirty bytes than this: about as many are left for the
/// final pause.
const FEW_DIRTY_BYTES: u64 = 2 << 20;
/// Maximum number of checkpoints that are taken while the guest runs.
const MAX_ROUNDS: usize = 16;

/// A guest with few dirty pages, for which a destination QEMU waits.
pub(super) struct PrecopiedGuest<'a> {
    pub series: CheckpointSeries<'a>,
    pub session: TrackingSession,
    pub rounds: Vec<Round>,
    /// The pages of the newest checkpoint that the destination host has read; none if it must read them again.
    pub pages_read_remotely: Option<Vec<PageRun>>,
}

impl<'a> PrecopiedGuest<'a> {
    pub fn make(
        host: &Host,
        target: &Target,
        protect_settings: &'a ProtectSettings,
        protection: ProtectionLock,
        stop: &AtomicBool,
        connection: &mut Connection,
        on_event: &mut dyn FnMut(&MoveEvent),
    ) -> Result<Self, MoveError> {
        let name = target.name();
        let mut series = CheckpointSeries::open(host, target, protect_settings, &format!("move {name}"), protection)?;
        let mut session = start_session(&mut series, target, stop, on_event)?;
        let mut rounds: Vec<Round> = Vec::new();
        while !is_last_round(&rounds) {
            if stop.load(Ordering::Relaxed) {
                return Err(MoveError::Interrupted { name: name.to_string() });
            }
            let round = take_round(&mut series, &mut session)?;
            on_event(&MoveEvent::Round(round.clone()));
            rounds.push(round);
            if rounds.len() == 1 {
                // After the first checkpoint, the store has the data that a destination QEMU needs to start.
                match connection.ask(&Message::Prepare {}, PREPARE_TIMEOUT)? {
                    Answer::Prepared { pid: Some(pid), .. } => on_event(&MoveEvent::Prepared { pid }),
                    Answer::Prepared { pid: None, .. } => {}
                    answer => return Err(unexpected(answer, name, connection.host())),
                }
                fault::point("move.prepare.prepared", Some(target.vmm()), None);
            }
        }
        let pages_read_remotely = match connection.ask(&Message::ReadNewest {}, PREPARE_TIMEOUT)? {
            Answer::NewestRead { checkpoint, pages } => {
                let newest = rounds.last().map(|round| round.checkpoint);
                (checkpoint.is_some() && checkpoint == newest).then_some(pages)
            }
            answer => return Err(unexpected(answer, name, connection.host())),
        };
        Ok(Self { series, session, rounds, pages_read_remotely })
    }
}

/// Starts to track the guest's memory. If a restore still loads it and its pager prevents that, waits for the pager.
fn start_session(
    series: &mut CheckpointSeries<'_>,
    target: &Target,
    stop: &AtomicBool,
    on_event: &mut dyn FnMut(&MoveEvent),
) -> Result<TrackingSession, MoveError> {
    let name = target.name();
    let deadline = Instant::now() + FILL_TIMEOUT;
    let mut is_reported = false;
    loop {
        // Asked first: a pager that ends during the attempt is no reason to drop the move.
        let has_pager = is_served(target.rundir()).map_err(|e| checkpoint_failed(name, e.into()))?;
        let e = match series.start_session(target) {
            Ok(session) => return Ok(session),
            Err(TrackingStartError::Fatal(e)) => return Err(MoveError::Protect(e)),
            Err(TrackingStartError::Retryable(e)) => e,
        };
        if !has_pager || !matches!(e, CheckpointError::Filling { .. }) || Instant::now() >= deadline {
            return Err(checkpoint_failed(name, e));
        }
        if stop.load(Ordering::Relaxed) {
            return Err(MoveError::Interrupted { name: name.to_owned() });
        }
        if !is_reported {
            on_event(&MoveEvent::Waits { why: e.to_string() });
            is_reported = true;
        }
        thread::sleep(FILL_POLL_INTERVAL);
    }
}

/// Returns whether few dirty bytes are left, or their number does not decrease.
fn is_last_round(rounds: &[Round]) -> bool {
    let [.., previous, last] = rounds else { return false };
    last.dirty_bytes <= FEW_DIRTY_BYTES
        || last.dirty_bytes >= previous.dirty_bytes / 10 * 9
        || rounds.len() >= MAX_ROUNDS
}

fn take_round(series: &mut CheckpointSeries<'_>, session: &mut TrackingSession) -> Result<Round, MoveError> {
    let report = series.checkpoint(session).map_err(|e| {
        let rundir = session.target.rundir();
        match series.handle_new_owner(rundir, &e) {
            Some(e) => MoveError::Protect(e),
            None => checkpoint_failed(rundir.name(), e),
        }
    })?;
    Ok(Round {
        checkpoint: report.number,
        dirty_bytes: report.dirty_bytes,
        bytes: report.bytes,
        stopped_us: report.stopped_us,
        took_us: report.took_us,
    })
}

pub(super) fn checkpoint_failed(name: &str, e: CheckpointError) -> MoveError {
    MoveError::Checkpoint { name: name.into(), source: Box::new(e) }
}
