//! Starts the object store of the tests for a program that is not a test, such as a benchmark. Prints one JSON object with
//! the bucket and the variables of the environment, and runs until its standard input is closed.

use rekindle_testing::object_store::{BUCKET, ObjectStoreServer};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, Read};

fn main() -> io::Result<()> {
    let server = ObjectStoreServer::start();
    let environment = BTreeMap::from(server.environment());
    println!("{}", json!({"bucket": BUCKET, "environment": environment}));
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
