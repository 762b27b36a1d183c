//! The store of a URL, with the credentials that the environment has.

use object_store::aws::{AmazonS3, AmazonS3Builder, Checksum};
use object_store::azure::{MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

/// How long a connection may take, and how long a store may stay silent, before the request is repeated.
const CONNECT: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_secs(30);
/// How long a request is repeated in all.
const PATIENCE: Duration = Duration::from_secs(180);

/// An object store.
#[derive(Debug)]
pub enum Store {
    S3(AmazonS3),
    Google(GoogleCloudStorage),
    Azure(MicrosoftAzure),
}

impl Store {
    /// Its uploads in parts.
    pub fn parts(&self) -> &dyn MultipartStore {
        match self {
            Self::S3(store) => store,
            Self::Google(store) => store,
            Self::Azure(store) => store,
        }
    }
}

impl Deref for Store {
    type Target = dyn ObjectStore;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::S3(store) => store,
            Self::Google(store) => store,
            Self::Azure(store) => store,
        }
    }
}

/// Why a URL has no store.
#[derive(Debug, thiserror::Error)]
#[error("{url}: {why}")]
pub struct Refused {
    url: String,
    why: String,
}

/// The store of a URL, and what the URL names in it.
///
/// # Errors
/// A URL or settings of the environment that cannot be understood.
pub(super) fn store_at(path: &Path) -> Result<(Arc<Store>, Key), Refused> {
    let text = path.to_string_lossy();
    let refused = |why: String| Refused { url: text.to_string(), why };
    let url = Url::parse(&text).map_err(|error| refused(error.to_string()))?;
    if !url.username().is_empty() && !url.scheme().starts_with("ab") || url.password().is_some() {
        let why = "a URL with a user or password: give credentials by the environment".into();
        return Err(Refused { url: format!("{}://...", url.scheme()), why });
    }
    let key = Key::from_url_path(url.path()).map_err(|error| refused(error.to_string()))?;
    let built = match url.scheme() {
        "s3" | "s3a" => s3(&url).map(Store::S3),
        "gs" => google(&url).map(Store::Google),
        _ => azure(&url).map(Store::Azure),
    };
    Ok((Arc::new(built.map_err(|error| refused(error.to_string()))?), key))
}

/// Has the bytes that arrive compared with those that were sent: by TLS, or without it by the hash in the signature, which every
/// server checks. Names a checksum besides, which Amazon's checks. The environment can choose otherwise:
/// `AWS_CHECKSUM_ALGORITHM`, `AWS_UNSIGNED_PAYLOAD`.
fn s3(url: &Url) -> object_store::Result<AmazonS3> {
    let has = |name: &str| std::env::var_os(name).is_some();
    let mut builder = AmazonS3Builder::from_env().with_url(url.as_str()).with_retry(retries());
    if !has("AWS_CHECKSUM_ALGORITHM") {
        builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
    }
    let allows_http = is_on("AWS_ALLOW_HTTP");
    if !has("AWS_UNSIGNED_PAYLOAD") {
        builder = builder.with_unsigned_payload(!allows_http);
    }
    builder.with_client_options(client(allows_http)).build()
}

fn google(url: &Url) -> object_store::Result<GoogleCloudStorage> {
    let builder = GoogleCloudStorageBuilder::from_env().with_url(url.as_str());
    builder.with_retry(retries()).with_client_options(client(false)).build()
}

fn azure(url: &Url) -> object_store::Result<MicrosoftAzure> {
    let builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str());
    builder.with_retry(retries()).with_client_options(client(is_on("AZURE_ALLOW_HTTP"))).build()
}

/// Whether the environment says yes.
fn is_on(variable: &str) -> bool {
    let text = std::env::var(variable).unwrap_or_default();
    ["1", "true", "yes", "on"].contains(&&*text.to_lowercase())
}

/// Without a limit for a whole request: a slow store may take minutes for a part.
fn client(allows_http: bool) -> ClientOptions {
    ClientOptions::new()
        .with_timeout_disabled()
        .with_connect_timeout(CONNECT)
        .with_read_timeout(SILENCE)
        .with_allow_http(allows_http)
        .with_http1_only()
}

/// With jitter, which the client adds: ranks that were refused together do not come back together.
fn retries() -> RetryConfig {
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: CONNECT, base: 2. };
    RetryConfig { backoff, max_retries: 20, retry_timeout: PATIENCE }
}
