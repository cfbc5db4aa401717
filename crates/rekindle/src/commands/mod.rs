//! One file per command.

pub mod console;
pub mod doctor;
pub mod generate;
pub mod probe;
pub mod reboot;
pub mod recover;
pub mod run;
pub mod show;
pub mod stop;
pub mod store;
