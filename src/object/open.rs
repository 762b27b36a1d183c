//! The store of a URL, with the credentials that the environment has.

use super::answer;
use super::connect::Connector;
use crate::sys::environment;
use crate::sys::fork::{GENERATIONS, PerProcess};
use object_store::aws::{AmazonS3, AmazonS3Builder, Checksum};
use object_store::azure::{MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder};
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use url::Url;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a request is repeated in all.
const PATIENCE: Duration = Duration::from_secs(180);

/// Who retries a failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Retries {
    /// The store's client alone: 20 times, which takes about 20 s if connections are refused.
    Alone,
    /// The client, 5 times, and then its caller.
    ByCaller,
}

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
/// A URL or settings of the environment that cannot be understood. Tells nothing of a URL that may hold a secret.
pub(super) fn store_at(path: &Path, retries: Retries) -> Result<(Arc<Store>, Key), Refused> {
    let text = path.to_string_lossy();
    let (scheme, rest) = text.split_once("://").unwrap_or(("", &text));
    let secret = |why: &str| Refused { url: format!("{scheme}://..."), why: why.into() };
    let (authority, key) = rest.split_once('/').unwrap_or((rest, ""));
    if authority.contains(':') || (authority.contains('@') && !scheme.starts_with("abfs")) {
        return Err(secret("a URL with a user or password: give credentials by the environment"));
    }
    if rest.contains(['?', '#']) {
        return Err(secret(
            "a URL with ? or #, which are refused: write the name alone, and give credentials by the environment",
        ));
    }
    let refused = |why: String| Refused { url: text.to_string(), why };
    // The raw text: names in a store have no escapes.
    let key = Key::parse(key.trim_end_matches('/')).map_err(|error| refused(error.to_string()))?;
    let place = format!("{scheme}://{authority}");
    Ok((kept(&place, retries).map_err(refused)?, key))
}

/// A store, and what it was made of: its URL, its retries, and a hash of the environment.
type Kept = ((String, Retries, u64), Arc<Store>);

/// The stores that this process has asked. Their connections serve the next request: a list of steps makes one for each.
static KEPT: PerProcess<Vec<Kept>> =
    PerProcess::new([const { Mutex::new(Vec::new()) }; GENERATIONS]);

/// The store of a URL without a key, as the environment is now.
fn kept(place: &str, retries: Retries) -> Result<Arc<Store>, String> {
    // The builders, and the HTTP client for proxies and certificates, read it.
    environment::look(|| kept_here(place, retries))
}

fn kept_here(place: &str, retries: Retries) -> Result<Arc<Store>, String> {
    let made_of = (place.to_owned(), retries, hash_of_variables());
    let mut kept = KEPT.lock().ok_or("this process is forked too many times")?;
    if let Some((_, store)) = kept.iter().find(|(of, _)| *of == made_of) {
        return Ok(store.clone());
    }
    let store = Arc::new(build(place, retries).map_err(|error| answer::unmade(&error))?);
    // Those were made in another environment.
    kept.retain(|((known, how, _), _)| known != place || *how != retries);
    kept.push((made_of, store.clone()));
    Ok(store)
}

/// What the names of variables begin with that a store is made of: credentials, the authorities that are trusted, proxies.
const VARIABLES: [&str; 11] = [
    "AWS_",
    "AZURE_",
    "AZURITE_",
    "GOOGLE_",
    "SSL_CERT_",
    "HTTP",
    "http",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
];

/// A hash of the variables that stores are made of.
fn hash_of_variables() -> u64 {
    let mut hasher = DefaultHasher::new();
    for (name, value) in environment::vars_os() {
        let name = name.to_string_lossy();
        if VARIABLES.iter().any(|prefix| name.starts_with(prefix)) {
            (name, value).hash(&mut hasher);
        }
    }
    hasher.finish()
}

fn build(place: &str, retries: Retries) -> object_store::Result<Store> {
    let retries = config_of(retries);
    let url = Url::parse(place)
        .map_err(|error| object_store::Error::Generic { store: "URL", source: error.into() })?;
    match url.scheme() {
        "s3" | "s3a" => s3(&url, retries).map(Store::S3),
        "gs" => google(&url, retries).map(Store::Google),
        _ => azure(&url, retries).map(Store::Azure),
    }
}

/// Has the bytes that arrive compared with those that were sent: by TLS, or without it by the hash in the signature, which every
/// server checks. Names a checksum besides, which Amazon's checks. The environment can choose otherwise:
/// `AWS_CHECKSUM_ALGORITHM`, `AWS_UNSIGNED_PAYLOAD`.
fn s3(url: &Url, retries: RetryConfig) -> object_store::Result<AmazonS3> {
    let has = |name: &str| environment::var_os(name).is_some();
    let builder = AmazonS3Builder::from_env().with_url(url.as_str()).with_retry(retries);
    // A removal of several objects at once takes no condition as a header.
    let mut builder = builder.with_disable_bulk_delete(true);
    if !has("AWS_CHECKSUM_ALGORITHM") {
        builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
    }
    let allows_http = is_on("AWS_ALLOW_HTTP");
    if !has("AWS_UNSIGNED_PAYLOAD") {
        builder = builder.with_unsigned_payload(!allows_http);
    }
    builder.with_http_connector(Connector).with_client_options(client(allows_http)).build()
}

fn google(url: &Url, retries: RetryConfig) -> object_store::Result<GoogleCloudStorage> {
    let builder = GoogleCloudStorageBuilder::from_env().with_url(url.as_str());
    let builder = builder.with_http_connector(Connector).with_retry(retries);
    builder.with_client_options(client(is_on("GOOGLE_ALLOW_HTTP"))).build()
}

fn azure(url: &Url, retries: RetryConfig) -> object_store::Result<MicrosoftAzure> {
    let builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str());
    let builder = builder.with_http_connector(Connector).with_retry(retries);
    builder.with_client_options(client(is_on("AZURE_ALLOW_HTTP"))).build()
}

/// Whether the environment says yes.
fn is_on(variable: &str) -> bool {
    let text = environment::var_os(variable).unwrap_or_default();
    ["1", "true", "yes", "on"].contains(&&*text.to_string_lossy().to_lowercase())
}

/// What the connector looks at: it sets the rest itself.
fn client(allows_http: bool) -> ClientOptions {
    ClientOptions::new().with_connect_timeout(CONNECT).with_allow_http(allows_http)
}

/// With jitter, which the client adds: ranks that were refused together do not come back together.
fn config_of(retries: Retries) -> RetryConfig {
    let max_retries = match retries {
        Retries::Alone => 20,
        Retries::ByCaller => 5,
    };
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(100), max_backoff: CONNECT, base: 2. };
    RetryConfig { backoff, max_retries, retry_timeout: PATIENCE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_in_urls_are_refused_and_not_told() {
        for url in [
            "s3://KEY:se/cret@b/x",
            "s3://KEY:secret@b/x",
            "az://c@a/x",
            "gs://b/x?sig=secret",
            "s3://b/run#2",
        ] {
            let why = store_at(Path::new(url), Retries::Alone).unwrap_err().to_string();
            assert!(!why.contains("secret") && !why.contains("run"), "{why}");
        }
    }

    #[test]
    fn store_is_made_while_nobody_changes_the_environment() {
        let looks = crate::sys::environment::tests::looks_in(|| {
            store_at(Path::new("s3://bucket-of-this-test/x"), Retries::Alone).unwrap();
        });
        assert!(looks > 0);
    }

    #[test]
    fn key_is_the_text_of_the_url() {
        for (url, key) in
            [("s3://b/run/step%41", "run/step%41"), ("s3://b/run/", "run"), ("s3://b", "")]
        {
            assert_eq!(store_at(Path::new(url), Retries::Alone).unwrap().1.as_ref(), key, "{url}");
        }
        assert!(store_at(Path::new("s3://b/a//b"), Retries::Alone).is_err());
    }
}
