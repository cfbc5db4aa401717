//! Waits for block I/O that a running guest has in flight.

use crate::qmp::{Qmp, QmpError};
use serde_json::{Value, json};

/// Returns when every block request that was in flight at the call has completed, and so has written the guest's
/// memory. The guest runs; its processors wait if they access a device meanwhile. Later requests are not waited for.
///
/// QEMU has no command for this alone. `transaction` begins with it, whatever its actions: `qmp_transaction` calls
/// `bdrv_drain_all` before the first one.
///
/// # Errors
/// If QEMU rejects the command or does not answer. Then requests may still be in flight.
pub fn drain(qmp: &mut Qmp) -> Result<(), QmpError> {
    qmp.execute::<Value>("transaction", json!({ "actions": [] })).map(drop)
}
