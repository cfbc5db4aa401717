//! Runs bytes as a program of a hostile guest and a hostile QEMU against a server.

#![no_main]

#[path = "../../tests/hostile/mod.rs"]
mod hostile;

use hostile::World;
use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

fuzz_target!(|bytes: &[u8]| {
    WORLD.with_borrow_mut(|world| world.get_or_insert_with(|| World::start(&std::env::temp_dir())).run(bytes));
});
