//! Tests of the whole store on a disk in memory, which records, loses, tears or fails each step.

mod crash;
mod creating;
mod damage;
mod disk;
mod encrypted;
mod epoch;
mod full;
mod guest;
mod history;
mod inspecting;
mod memory_objects;
mod model;
mod object_reads;
mod objects;
mod writing;
