//! Certificates of a client or server and of its trusted authority, and messages about unsuitable certificates.

use crate::credentials::Identity;
use crate::error::ConnectionError;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};
use std::io;
use std::path::Path;
use std::sync::Arc;

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

/// Converts an error of the TLS layer to one that names the cause and the remedy; `None` for any other error.
pub(crate) fn explain(e: &io::Error) -> Option<ConnectionError> {
    let tls = e.get_ref()?.downcast_ref::<rustls::Error>()?;
    let certificate = |why: String, remedy: &'static str| Some(ConnectionError::Certificate { why, remedy });
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
        },
        rustls::Error::NoCertificatesPresented => certificate(
            "the client presents no certificate".into(),
            "configure one that the authority has signed (--cert, --key)",
        ),
        rustls::Error::AlertReceived(alert) => match alert {
            AlertDescription::CertificateRequired => certificate(
                "the server requires a certificate".into(),
                "configure one that its authority has signed (--cert, --key)",
            ),
            AlertDescription::UnknownCA => certificate(
                "the other side does not know the authority that has signed our certificate".into(),
                "use a certificate signed by the authority configured there (--client-ca)",
            ),
            AlertDescription::CertificateExpired => {
                certificate("the other side reports that our certificate has expired".into(), "renew it (--cert)")
            }
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied
            | AlertDescription::DecryptError => certificate(
                format!("the other side does not accept our certificate ({alert:?})"),
                "use one for this purpose, signed by the authority configured there",
            ),
            other => Some(ConnectionError::Protocol { what: format!("the other side reports {other:?}") }),
        },
        rustls::Error::InvalidMessage(_) => Some(ConnectionError::Protocol {
            what: "the other side does not speak TLS; is it `rekindle store serve`?".into(),
        }),
        other => Some(ConnectionError::Protocol { what: other.to_string() }),
    }
}
