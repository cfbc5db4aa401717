//! Credentials, endpoint, region and certificates of an S3 server, from `AWS_*` variables: those of an environment file, and
//! those of the environment that it does not set.

use crate::environment_file::Variables;
use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::{BackoffConfig, Certificate, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::{Arc, Once};
use std::time::Duration;
use std::{env, fs, io};

/// File of certificates of authorities, in PEM, that are trusted in addition to those of the system.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";

/// Time after which a request is not tried again.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_RETRIES: usize = 10;
/// Time limit of a request in [`without_retries`], unless `AWS_TIMEOUT` sets another one.
const SINGLE_TIMEOUT: Duration = Duration::from_secs(10);

thread_local! {
    /// Object stores that this thread opens do not repeat failed requests.
    static WITHOUT_RETRIES: Cell<bool> = const { Cell::new(false) };
}

/// Restores the previous state on drop, also during a panic.
struct Restored(bool);

impl Drop for Restored {
    fn drop(&mut self) {
        WITHOUT_RETRIES.set(self.0);
    }
}

/// Does `work` with stores that it opens, whose failed requests are not repeated: for a caller that repeats `work` until a
/// deadline of its own.
pub fn without_retries<T>(work: impl FnOnce() -> T) -> T {
    let _restored = Restored(WITHOUT_RETRIES.replace(true));
    work()
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// Returns the bucket of the S3 server that the environment and `file` describe.
pub(super) fn s3(bucket: &str, file: &Variables) -> io::Result<Arc<dyn ObjectStore>> {
    static CRYPTOGRAPHY: Once = Once::new();
    CRYPTOGRAPHY.call_once(|| {
        // An error means that the process has chosen a provider before.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    let without_retries = WITHOUT_RETRIES.get();
    let max_retries = if without_retries { 0 } else { MAX_RETRIES };
    let retry = RetryConfig { backoff: BackoffConfig::default(), max_retries, retry_timeout: RETRY_TIMEOUT };
    let mut builder = AmazonS3Builder::new();
    let mut options = ClientOptions::default();
    if without_retries {
        options = options.with_timeout(SINGLE_TIMEOUT);
    }
    for (name, value) in merged(env::vars_os(), file) {
        let key = name.to_ascii_lowercase();
        if let Some(Ok(key)) = key.strip_prefix("aws_").map(str::parse::<ClientConfigKey>) {
            if matches!(key, ClientConfigKey::AllowInvalidCertificates) {
                return Err(invalid(format!(
                    "AWS_ALLOW_INVALID_CERTIFICATES is not supported: any server could read the guest's memory; name the file of \
                     the server's certificate in {CA_BUNDLE}"
                )));
            }
            options = options.with_config(key, &value);
        }
        if let Ok(key) = key.parse() {
            builder = builder.with_config(key, &value);
        }
        if name == CA_BUNDLE {
            let failed = |e: String| invalid(format!("{CA_BUNDLE}={value}: {e}"));
            let pem = fs::read(&value).map_err(|e| failed(e.to_string()))?;
            for certificate in Certificate::from_pem_bundle(&pem).map_err(|e| failed(e.to_string()))? {
                options = options.with_root_certificate(certificate);
            }
        }
    }
    let builder = builder
        .with_bucket_name(bucket)
        .with_retry(retry)
        // The ownership of a store depends on conditional requests: no variable can turn them off.
        .with_conditional_put(S3ConditionalPut::ETagMatch);
    Ok(Arc::new(builder.with_client_options(options).build().map_err(invalid)?))
}

/// Returns the `AWS_*` variables that are not empty: those of the environment, then those of `file`. A later one replaces an
/// earlier one, also one with another name for the same setting. If the file has a key, no credential of the environment
/// is used: that of another account must not be combined with it.
fn merged(environment: impl Iterator<Item = (OsString, OsString)>, file: &Variables) -> Vec<(String, String)> {
    const CREDENTIALS: [&str; 8] = [
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_TOKEN",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_ROLE_ARN",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ];
    let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    let has_key = file.0.contains_key("AWS_ACCESS_KEY_ID");
    let is_used = |name: &str| name.starts_with("AWS_") && !(has_key && CREDENTIALS.contains(&name));
    let inherited = environment.filter_map(text).filter(|(name, value)| is_used(name) && !value.is_empty());
    let inherited: BTreeMap<_, _> = inherited.filter(|(name, _)| !file.0.contains_key(name)).collect();
    inherited.into_iter().chain(file.0.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_file_replace_those_of_the_environment() {
        let file = |pairs: &[(&str, &str)]| {
            Variables(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
        };
        let merge = |inherited: &[(&str, &str)], file: &Variables| {
            let inherited = inherited.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
            merged(inherited, file).into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        let region = file(&[("AWS_REGION", "b")]);
        let inherited = [("AWS_REGION", "a"), ("AWS_TIMEOUT", "5s"), ("AWS_CA_BUNDLE", ""), ("HOME", "/root")];
        assert_eq!(merge(&inherited, &region), ["AWS_TIMEOUT=5s", "AWS_REGION=b"]);
        // The last one counts, whatever it is called.
        let endpoint = file(&[("AWS_ENDPOINT", "b")]);
        assert_eq!(merge(&[("AWS_ENDPOINT_URL", "a")], &endpoint), ["AWS_ENDPOINT_URL=a", "AWS_ENDPOINT=b"]);
        let token = [("AWS_SESSION_TOKEN", "t"), ("AWS_ROLE_ARN", "r")];
        assert_eq!(merge(&token, &region).len(), 3);
        assert_eq!(merge(&token, &file(&[("AWS_ACCESS_KEY_ID", "id")])), ["AWS_ACCESS_KEY_ID=id"]);
    }
}
