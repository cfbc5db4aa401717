//! Programs of a hostile guest and a hostile QEMU, a fixed number on each build, against a running server. `fuzz/`
//! runs them for hours.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod hostile;

use hostile::World;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;

/// Programs of one run.
const PROGRAMS: u64 = 400;
const MAX_PROGRAM_BYTES: usize = 400;

#[test]
fn after_any_actions_of_a_guest_and_its_qemu_the_server_serves_the_next_one() {
    let seed = std::env::var("REKINDLE_TEST_SEED").ok().map_or_else(|| fastrand::u64(..), |text| text.parse().unwrap());
    println!("REKINDLE_TEST_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut world = World::start(Path::new(env!("CARGO_TARGET_TMPDIR")));
    for number in 0..PROGRAMS {
        let program: Vec<u8> = (0..random.usize(1..MAX_PROGRAM_BYTES)).map(|_| random.u8(..)).collect();
        let ended = catch_unwind(AssertUnwindSafe(|| {
            world.run(&program);
            world.check_growth();
        }));
        if let Err(panic) = ended {
            println!("program {number} of REKINDLE_TEST_SEED={seed}: {program:?}");
            // The server may hang, and ending it would wait for it.
            resume_unwind(panic);
        }
    }
}
