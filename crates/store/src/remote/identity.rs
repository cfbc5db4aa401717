//! Certificates of a client or server and of its trusted authority, and messages about unsuitable certificates.

use crate::credentials::Identity;
use crate::error::ConnectionError;
use crate::types::{now_us, utc};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, io};

impl Identity {
    fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ConnectionError> {
        let failed = |why: String| ConnectionError::File { path: path.to_owned(), what: "certificate", why };
        let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let found = read.map_err(|e| failed(e.to_string()))?;
        if found.is_empty() { Err(failed("it has none in PEM".into())) } else { Ok(found) }
    }

    fn own_key(&self) -> Result<PrivateKeyDer<'static>, ConnectionError> {
        PrivateKeyDer::from_pem_file(&self.key).map_err(|e| ConnectionError::File {
            path: self.key.clone(),
            what: "private key",
            why: e.to_string(),
        })
    }

    fn roots(&self) -> Result<RootCertStore, ConnectionError> {
        let mut roots = RootCertStore::empty();
        for certificate in Self::certificates(&self.ca)? {
            roots.add(certificate).map_err(|e| ConnectionError::File {
                path: self.ca.clone(),
                what: "authority's certificate",
                why: e.to_string(),
            })?;
        }
        Ok(roots)
    }

    fn unusable(&self, e: &rustls::Error) -> ConnectionError {
        ConnectionError::File { path: self.cert.clone(), what: "certificate", why: format!("with its key: {e}") }
    }

    /// Returns the TLS configuration of a client.
    ///
    /// # Errors
    /// [`ConnectionError::File`] if a file cannot be used.
    pub(crate) fn client(&self) -> Result<Arc<ClientConfig>, ConnectionError> {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| self.unusable(&e))?;
        let config = builder
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(Self::certificates(&self.cert)?, self.own_key()?)
            .map_err(|e| self.unusable(&e))?;
        Ok(Arc::new(config))
    }

    /// Returns the TLS configuration of a server. Clients must present a certificate.
    ///
    /// # Errors
    /// [`ConnectionError::File`] if a file cannot be used.
    pub(crate) fn server(&self) -> Result<Arc<ServerConfig>, ConnectionError> {
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(self.roots()?), provider.clone())
            .build()
            .map_err(|e| ConnectionError::File {
            path: self.ca.clone(),
            what: "authority's certificate",
            why: e.to_string(),
        })?;
        let builder = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| self.unusable(&e))?;
        let config = builder
            .with_client_cert_verifier(verifier)
            .with_single_cert(Self::certificates(&self.cert)?, self.own_key()?)
            .map_err(|e| self.unusable(&e))?;
        Ok(Arc::new(config))
    }
}

/// The local end of a connection, for messages.
#[derive(Debug, Clone)]
pub(crate) struct LocalEnd {
    /// The file of the local certificate.
    cert: PathBuf,
    is_server: bool,
}

impl LocalEnd {
    pub fn client(cert: &Path) -> Self {
        Self { cert: cert.to_owned(), is_server: false }
    }

    pub fn server(cert: &Path) -> Self {
        Self { cert: cert.to_owned(), is_server: true }
    }

    /// Returns the name of the other end.
    fn peer(&self) -> &'static str {
        if self.is_server { "client" } else { "server" }
    }

    /// Describes a certificate of the other end that is not valid at this time. `wrong`: what is wrong with it.
    fn not_valid_now(&self, wrong: &str, limit: Option<UnixTime>) -> ConnectionError {
        let limit =
            limit.map_or_else(String::new, |time| format!(" at {}", utc(time.as_secs().saturating_mul(1_000_000))));
        ConnectionError::Certificate {
            why: format!(
                "the certificate of the {} {wrong}{limit}, and this machine's clock is at {}",
                self.peer(),
                utc(now_us())
            ),
            remedy: format!("renew it on the {}, or set this machine's clock", self.peer()),
        }
    }

    /// Converts an error of the TLS layer to one that names the cause and the remedy; `None` for any other error.
    pub fn explain(&self, e: &io::Error) -> Option<ConnectionError> {
        let tls = e.get_ref()?.downcast_ref::<rustls::Error>()?;
        Some(match tls {
            rustls::Error::InvalidCertificate(bad) => self.explain_certificate(bad),
            rustls::Error::NoCertificatesPresented => certificate(
                "the client presents no certificate".into(),
                "configure one that the authority has signed (--cert, --key)",
            ),
            rustls::Error::AlertReceived(alert) => self.explain_alert(*alert),
            rustls::Error::InvalidMessage(_) => {
                ConnectionError::protocol("the other side does not speak TLS; is it `rekindle store serve`?")
            }
            other => ConnectionError::protocol(other.to_string()),
        })
    }

    /// Describes a certificate of the other end that is not accepted.
    fn explain_certificate(&self, bad: &CertificateError) -> ConnectionError {
        match bad {
            CertificateError::Expired => self.not_valid_now("has expired", None),
            CertificateError::ExpiredContext { not_after, .. } => self.not_valid_now("has expired", Some(*not_after)),
            CertificateError::NotValidYet => self.not_valid_now("is not valid yet", None),
            CertificateError::NotValidYetContext { not_before, .. } => {
                self.not_valid_now("is not valid yet: it begins", Some(*not_before))
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => certificate(
                format!("the server's certificate is for another name ({bad})"),
                "use a name in the certificate, or create one for this name (subjectAltName)",
            ),
            CertificateError::UnknownIssuer => certificate(
                "the other side's certificate is not signed by the configured authority".into(),
                "configure the authority that has signed it (--ca, --client-ca)",
            ),
            other => certificate(
                format!("the other side's certificate is bad: {other}"),
                "inspect it with openssl x509 -text, and replace it",
            ),
        }
    }

    /// Describes why the other end does not accept the local certificate.
    fn explain_alert(&self, alert: AlertDescription) -> ConnectionError {
        let cert = self.cert.display();
        match alert {
            AlertDescription::CertificateRequired => certificate(
                "the server requires a certificate".into(),
                "configure one that its authority has signed (--cert, --key)",
            ),
            AlertDescription::UnknownCA => certificate(
                format!("the other side does not know the authority that has signed the certificate {cert}"),
                "use a certificate signed by the authority configured there (--client-ca)",
            ),
            AlertDescription::CertificateExpired => ConnectionError::Certificate {
                why: format!(
                    "the {} reports that the certificate {cert} has expired or is not valid yet, by its clock",
                    self.peer()
                ),
                remedy: format!("renew it, or set the clock of the {}", self.peer()),
            },
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError => certificate(
                format!("the other side does not accept the certificate {cert} ({alert:?})"),
                "use one for this purpose, signed by the authority configured there",
            ),
            other => ConnectionError::protocol(format!("the other side reports {other:?}")),
        }
    }
}

fn certificate(why: String, remedy: &str) -> ConnectionError {
    ConnectionError::Certificate { why, remedy: remedy.to_owned() }
}

/// The TLS configuration of a server, of the newest usable files: certificates are renewed while it runs.
#[derive(Debug)]
pub(crate) struct ServerTls {
    identity: Identity,
    current: Mutex<LoadedFiles>,
}

#[derive(Debug)]
struct LoadedFiles {
    versions: Vec<Option<FileVersion>>,
    config: Arc<ServerConfig>,
}

/// Device, inode, length, and time of the last change.
type FileVersion = (u64, u64, u64, (i64, i64));

impl ServerTls {
    /// # Errors
    /// [`ConnectionError::File`] if a file cannot be used.
    pub fn new(identity: &Identity) -> Result<Self, ConnectionError> {
        // Before the files are read, so that no change is missed.
        let versions = versions(identity);
        let config = identity.server()?;
        Ok(Self { identity: identity.clone(), current: Mutex::new(LoadedFiles { versions, config }) })
    }

    /// Returns the configuration. Reads files that have changed; while they cannot be used, the previous ones count.
    pub fn config(&self) -> Arc<ServerConfig> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let versions = versions(&self.identity);
        if versions != current.versions {
            match self.identity.server() {
                Ok(config) => {
                    tracing::info!("the certificate {} was read again", self.identity.cert.display());
                    *current = LoadedFiles { versions, config };
                }
                Err(e) => tracing::warn!("the changed certificate, key or authority is not used: {e}"),
            }
        }
        current.config.clone()
    }

    pub fn local_end(&self) -> LocalEnd {
        LocalEnd::server(&self.identity.cert)
    }
}

fn versions(identity: &Identity) -> Vec<Option<FileVersion>> {
    let version = |path: &PathBuf| {
        let found = fs::metadata(path).ok()?;
        Some((found.dev(), found.ino(), found.len(), (found.ctime(), found.ctime_nsec())))
    };
    [&identity.cert, &identity.key, &identity.ca].map(version).into()
}
