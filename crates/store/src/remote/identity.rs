//! Certificates: who we are, whom we trust, and what is wrong when it does not fit.

use super::line::LineError;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files with our certificate, its key, and the authority whose certificates we accept; all PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Our certificate, with those in between it and the authority's.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority of the other side.
    pub ca: PathBuf,
}

impl Identity {
    fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, LineError> {
        let failed = |why: String| LineError::File { path: path.to_owned(), what: "certificate", why };
        let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let found = read.map_err(|e| failed(e.to_string()))?;
        if found.is_empty() { Err(failed("it has none in PEM".into())) } else { Ok(found) }
    }

    fn own_key(&self) -> Result<PrivateKeyDer<'static>, LineError> {
        PrivateKeyDer::from_pem_file(&self.key).map_err(|e| LineError::File {
            path: self.key.clone(),
            what: "private key",
            why: e.to_string(),
        })
    }

    fn roots(&self) -> Result<RootCertStore, LineError> {
        let mut roots = RootCertStore::empty();
        for certificate in Self::certificates(&self.ca)? {
            roots.add(certificate).map_err(|e| LineError::File {
                path: self.ca.clone(),
                what: "authority's certificate",
                why: e.to_string(),
            })?;
        }
        Ok(roots)
    }

    fn unusable(&self, e: &rustls::Error) -> LineError {
        LineError::File { path: self.cert.clone(), what: "certificate", why: format!("with its key: {e}") }
    }

    /// How to connect with it.
    ///
    /// # Errors
    /// [`LineError::File`].
    pub(crate) fn client(&self) -> Result<Arc<ClientConfig>, LineError> {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| self.unusable(&e))?;
        let config = builder
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(Self::certificates(&self.cert)?, self.own_key()?)
            .map_err(|e| self.unusable(&e))?;
        Ok(Arc::new(config))
    }

    /// How to be connected to with it. Clients must show a certificate.
    ///
    /// # Errors
    /// [`LineError::File`].
    pub(crate) fn server(&self) -> Result<Arc<ServerConfig>, LineError> {
        let provider = Arc::new(ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(self.roots()?), provider.clone()).build().map_err(
                |e| LineError::File { path: self.ca.clone(), what: "authority's certificate", why: e.to_string() },
            )?;
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

/// What an error of the TLS layer means for whoever has to mend it; `None` if it is no such error.
pub(crate) fn explain(e: &io::Error) -> Option<LineError> {
    let tls = e.get_ref()?.downcast_ref::<rustls::Error>()?;
    let certificate = |why: String, mend: &'static str| Some(LineError::Certificate { why, mend });
    match tls {
        rustls::Error::InvalidCertificate(bad) => match bad {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                certificate("the other side's certificate has expired".into(), "renew it, or set this machine's clock")
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                certificate("the other side's certificate is not valid yet".into(), "set this machine's clock")
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => certificate(
                format!("the server's certificate is for another name ({bad})"),
                "use a name that it is for, or have it made for this one (subjectAltName)",
            ),
            CertificateError::UnknownIssuer => certificate(
                "the other side's certificate is not signed by the authority that was given".into(),
                "give the authority that has signed it (--ca, --client-ca)",
            ),
            other => certificate(
                format!("the other side's certificate is bad: {other}"),
                "have it made anew, and look at it: openssl x509 -text",
            ),
        },
        rustls::Error::NoCertificatesPresented => certificate(
            "the client shows no certificate".into(),
            "give it one that the authority has signed (--cert, --key)",
        ),
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateRequired => certificate(
                "the server wants to see a certificate".into(),
                "give one that its authority has signed (--cert, --key)",
            ),
            AlertDescription::UnknownCA => certificate(
                "the other side does not know the authority that has signed our certificate".into(),
                "have it signed by the one that the other side was given (--client-ca)",
            ),
            AlertDescription::CertificateExpired => {
                certificate("the other side says that our certificate has expired".into(), "renew it (--cert)")
            }
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError => certificate(
                format!("the other side does not accept our certificate ({alert:?})"),
                "have it made for this use, and signed by the authority that the other side was given",
            ),
            other => Some(LineError::Protocol { what: format!("the other side says {other:?}") }),
        },
        rustls::Error::InvalidMessage(_) => Some(LineError::Protocol {
            what: "the other side does not speak TLS; is it `rekindle store serve`?".into(),
        }),
        other => Some(LineError::Protocol { what: other.to_string() }),
    }
}
