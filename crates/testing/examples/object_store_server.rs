//! Starts the object store of the tests for a program that is not a test, such as a benchmark.
//!
//! `object_store_server [ADDRESS [CERTIFICATE KEY AUTHORITY]]`: where its gateway listens, and the PEM files for `https`.
//! Prints one JSON object with the bucket, the variables of the environment and the process id of the gateway. The line
//! `restart` on its standard input kills the gateway and starts another one, and prints its process id. It runs until the
//! line `end`, or until its standard input is closed.

use rekindle_testing::object_store::{BUCKET, Listener, ObjectStoreServer, TlsFiles};
use serde_json::json;
use std::collections::BTreeMap;
use std::{env, io};

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

fn listener(arguments: &[String]) -> io::Result<Listener> {
    let parse = |address: &String| address.parse().map_err(|e| invalid(format!("{address}: {e}")));
    match arguments {
        [] => Ok(Listener::default()),
        [address] => Ok(Listener { address: parse(address)?, tls: None }),
        [address, certificate, key, authority] => {
            let (certificate, key, authority) = (certificate.into(), key.into(), authority.into());
            Ok(Listener { address: parse(address)?, tls: Some(TlsFiles { certificate, key, authority }) })
        }
        _ => Err(invalid("usage: object_store_server [ADDRESS [CERTIFICATE KEY AUTHORITY]]".into())),
    }
}

fn main() -> io::Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let mut server = ObjectStoreServer::start_at(listener(&arguments)?);
    let environment = BTreeMap::from(server.environment());
    println!("{}", json!({"bucket": BUCKET, "environment": environment, "gateway": server.gateway_pid()}));
    for line in io::stdin().lines() {
        match line?.as_str() {
            "restart" => {
                server.restart_gateway();
                println!("{}", json!({"gateway": server.gateway_pid()}));
            }
            "end" => break,
            other => return Err(invalid(format!("{other}: not a command"))),
        }
    }
    Ok(())
}
