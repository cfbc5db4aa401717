//! Tests of the store as a whole, over a disk in memory that records, loses, tears and refuses every step.

mod crash;
mod creating;
mod damage;
mod disk;
mod epoch;
mod full;
mod guest;
mod history;
mod inspecting;
mod model;
mod remote;
mod writing;
