//! Credentials, endpoint, region and certificates of an S3 server, from `AWS_*` variables: those of an environment file, and
//! those of the environment that it does not set.

use crate::credentials::Retries;
use crate::environment_file::Variables;
use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::{BackoffConfig, Certificate, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;
use std::{env, fs, io};

/// File of certificates of authorities, in PEM, that are trusted in addition to those of the system.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";

/// Time after which a request is not tried again: more than its own time limit (30 s), so that one without an answer is tried again.
const RETRY_TIMEOUT: Duration = Duration::from_secs(35);
/// With the delays between them, requests that are rejected are tried for 10 s. What must wait longer for a store, such as a protector,
/// a pager or a cluster's agent, tries again by itself, and reports it.
const MAX_RETRIES: usize = 12;
/// Longest wait before a request is tried again.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Time limit of a request that is not repeated, unless `AWS_TIMEOUT` sets another one.
const SINGLE_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// What a client was made from.
#[derive(PartialEq, Eq)]
struct Settings {
    bucket: String,
    retries: Retries,
    variables: Vec<(String, String)>,
    /// Content of the file that [`CA_BUNDLE`] names.
    authorities: Option<Vec<u8>>,
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// Returns the bucket of the S3 server that the environment and `file` describe. With the same settings as before, it is the same
/// client, whose connections are open already.
pub(super) fn s3(bucket: &str, file: &Variables, retries: Retries) -> io::Result<Arc<dyn ObjectStore>> {
    static NEWEST: Mutex<Option<(Settings, Arc<dyn ObjectStore>)>> = Mutex::new(None);
    let variables = merged(env::vars_os(), file);
    let bundle = variables.iter().find(|(name, _)| name == CA_BUNDLE);
    let read = |(_, path): &(String, String)| fs::read(path).map_err(|e| invalid(format!("{CA_BUNDLE}={path}: {e}")));
    let authorities = bundle.map(read).transpose()?;
    let settings = Settings { bucket: bucket.to_owned(), retries, variables, authorities };
    let mut newest = NEWEST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, client)) = newest.as_ref().filter(|(of_newest, _)| *of_newest == settings) {
        return Ok(Arc::clone(client));
    }
    let client = client(&settings)?;
    *newest = Some((settings, Arc::clone(&client)));
    Ok(client)
}

fn client(settings: &Settings) -> io::Result<Arc<dyn ObjectStore>> {
    static CRYPTOGRAPHY: Once = Once::new();
    CRYPTOGRAPHY.call_once(|| {
        // An error means that the process has chosen a provider before.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    let backoff = BackoffConfig { max_backoff: MAX_RETRY_DELAY, ..BackoffConfig::default() };
    let (max_retries, mut options) = match settings.retries {
        Retries::Usual => (MAX_RETRIES, ClientOptions::default()),
        Retries::Never => (0, ClientOptions::default().with_timeout(SINGLE_REQUEST_TIMEOUT)),
    };
    let retry = RetryConfig { backoff, max_retries, retry_timeout: RETRY_TIMEOUT };
    let mut builder = AmazonS3Builder::new();
    for (name, value) in &settings.variables {
        let key = name.to_ascii_lowercase();
        if let Some(Ok(key)) = key.strip_prefix("aws_").map(str::parse::<ClientConfigKey>) {
            if matches!(key, ClientConfigKey::AllowInvalidCertificates) {
                return Err(invalid(format!(
                    "AWS_ALLOW_INVALID_CERTIFICATES is not supported: any server could read the guest's memory; name the file of \
                     the server's certificate in {CA_BUNDLE}"
                )));
            }
            options = options.with_config(key, value);
        }
        if let Ok(key) = key.parse() {
            builder = builder.with_config(key, value);
        }
        if let Some(pem) = settings.authorities.as_ref().filter(|_| name == CA_BUNDLE) {
            let certificates = Certificate::from_pem_bundle(pem);
            for certificate in certificates.map_err(|e| invalid(format!("{CA_BUNDLE}={value}: {e}")))? {
                options = options.with_root_certificate(certificate);
            }
        }
    }
    let builder = builder
        .with_bucket_name(&settings.bucket)
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
    fn the_same_settings_have_the_same_client() {
        let directory = tempfile::tempdir().unwrap();
        let bundle = directory.path().join("ca.pem");
        fs::write(&bundle, "").unwrap();
        let file = |region: &str| {
            let key = [("AWS_ACCESS_KEY_ID", "id"), ("AWS_SECRET_ACCESS_KEY", "key")];
            let pairs = [key[0], key[1], ("AWS_REGION", region), (CA_BUNDLE, bundle.to_str().unwrap())];
            Variables(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into())
        };
        let first = s3("same", &file("a"), Retries::Usual).unwrap();
        assert!(Arc::ptr_eq(&first, &s3("same", &file("a"), Retries::Usual).unwrap()));
        assert!(!Arc::ptr_eq(&first, &s3("same", &file("b"), Retries::Usual).unwrap()));
        let first = s3("same", &file("a"), Retries::Usual).unwrap();
        fs::write(&bundle, "# renewed\n").unwrap();
        assert!(!Arc::ptr_eq(&first, &s3("same", &file("a"), Retries::Usual).unwrap()), "with other authorities");
    }

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
