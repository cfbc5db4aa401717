//! Credentials, endpoint, region and certificates of an S3 server, from the `AWS_*` variables of the environment.

use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::{BackoffConfig, Certificate, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use std::sync::{Arc, Once};
use std::time::Duration;
use std::{env, fs, io};

/// File of certificates of authorities, in PEM, that are trusted in addition to those of the system.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";

/// Time after which a request is not tried again.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_RETRIES: usize = 10;

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// Returns the bucket of the S3 server that the environment describes.
pub(super) fn s3(bucket: &str) -> io::Result<Arc<dyn ObjectStore>> {
    static CRYPTOGRAPHY: Once = Once::new();
    CRYPTOGRAPHY.call_once(|| {
        // An error means that the process has chosen a provider before.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
    let retry =
        RetryConfig { backoff: BackoffConfig::default(), max_retries: MAX_RETRIES, retry_timeout: RETRY_TIMEOUT };
    let builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_retry(retry)
        // The ownership of a store depends on conditional requests: the environment cannot turn them off.
        .with_conditional_put(S3ConditionalPut::ETagMatch);
    let mut options = ClientOptions::default();
    for (key, value) in env::vars().filter(|(_, value)| !value.is_empty()) {
        if let Some(key) = key.strip_prefix("AWS_")
            && let Ok(key) = key.to_ascii_lowercase().parse::<ClientConfigKey>()
        {
            if matches!(key, ClientConfigKey::AllowInvalidCertificates) {
                return Err(invalid(format!(
                    "AWS_ALLOW_INVALID_CERTIFICATES is not supported: any server could read the guest's memory; name the file of \
                     the server's certificate in {CA_BUNDLE}"
                )));
            }
            options = options.with_config(key, value);
        }
    }
    if let Some(path) = env::var_os(CA_BUNDLE).filter(|path| !path.is_empty()) {
        let failed = |e: String| invalid(format!("{CA_BUNDLE}={}: {e}", path.display()));
        let pem = fs::read(&path).map_err(|e| failed(e.to_string()))?;
        for certificate in Certificate::from_pem_bundle(&pem).map_err(|e| failed(e.to_string()))? {
            options = options.with_root_certificate(certificate);
        }
    }
    Ok(Arc::new(builder.with_client_options(options).build().map_err(invalid)?))
}
