//! Requests to object stores.

use super::answer;
use super::connect;
use super::open::{self, Retries, Store};
use super::{Listing, Version, failed};
use crate::engine::queue::cancelled;
use crate::error::{Error, Result};
use crate::sys::fork::{GENERATIONS, PerProcess};
use bytes::Bytes;
use crossbeam_channel::bounded;
use futures_util::TryStreamExt;
use object_store::path::Path as Key;
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStoreExt, PutMode, PutOptions, PutPayload,
    UpdateVersion,
};
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// Threads that run requests. They wait for the network; what is computed per byte, a checksum, takes a few per cent of one.
const THREADS: usize = 2;

/// How long a store may be silent while it is read, before the read is repeated.
const SILENCE: Duration = Duration::from_secs(30);

/// How often a request looks at whether it is still wanted.
const TICK: Duration = Duration::from_millis(50);

/// A directory in an object store.
#[derive(Debug, Clone)]
pub struct Bucket {
    url: PathBuf,
    prefix: Key,
    pub(super) store: Arc<Store>,
    stop: Option<Arc<AtomicBool>>,
}

impl Bucket {
    /// The directory of a URL, with credentials from the environment. Asks the store for nothing yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that cannot be understood, or settings of the environment that cannot.
    pub fn at(url: &Path) -> Result<Self> {
        Self::with(url, Retries::Alone)
    }

    /// [`Bucket::at`] for a caller that retries failed requests: the client itself retries fewer times.
    ///
    /// # Errors
    /// As for [`Bucket::at`].
    pub fn retried_by_caller(url: &Path) -> Result<Self> {
        Self::with(url, Retries::ByCaller)
    }

    fn with(url: &Path, retries: Retries) -> Result<Self> {
        let (store, prefix) = open::store_at(url, retries)?;
        Ok(Self { url: url.into(), prefix, store, stop: None })
    }

    /// The same directory, whose requests end once `stop` is set.
    pub fn until(self, stop: Arc<AtomicBool>) -> Self {
        Self { stop: Some(stop), ..self }
    }

    /// Runs a request and waits for it.
    pub(super) fn run<T: Send + 'static>(
        &self,
        request: impl Future<Output = io::Result<T>> + Send + 'static,
    ) -> io::Result<T> {
        let (tell, told) = bounded(1);
        let request = unless(self.stop.clone(), request);
        start(async move { drop(tell.send(request.await)) })?;
        told.recv().unwrap_or_else(|_| Err(io::Error::other("a request's thread panicked")))
    }

    /// The URL.
    pub fn url(&self) -> &Path {
        &self.url
    }

    pub(super) fn key(&self, name: &str) -> Key {
        self.prefix.clone().join(name)
    }

    /// The bytes of an object of at most `most` bytes.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`]; [`io::ErrorKind::FileTooLarge`]; what the store says.
    pub fn read(&self, name: &str, most: u64) -> io::Result<Vec<u8>> {
        self.read_version(name, most).map(|(bytes, _)| bytes)
    }

    /// The bytes of an object of at most `most` bytes, and their version.
    ///
    /// # Errors
    /// As for [`Bucket::read`].
    pub fn read_version(&self, name: &str, most: u64) -> io::Result<(Vec<u8>, Version)> {
        let (store, key) = (self.store.clone(), self.key(name));
        self.run(async move {
            let got = store.get(&key).await.map_err(io_error)?;
            if got.meta.size > most {
                let why = format!("{} bytes, of which at most {most} are read", got.meta.size);
                return Err(failed(io::ErrorKind::FileTooLarge, why));
            }
            let version = Version { tag: got.meta.e_tag.clone(), number: got.meta.version.clone() };
            Ok((got.bytes().await.map_err(io_error)?.into(), version))
        })
    }

    /// Reads a range of an object.
    pub(super) async fn read_into(&self, name: &str, offset: u64, to: &mut [u8]) -> io::Result<()> {
        read_range(&self.store, &self.key(name), offset, to).await
    }

    /// So many bytes of an object, from an offset on.
    ///
    /// # Errors
    /// As for [`Bucket::read`]; [`io::ErrorKind::UnexpectedEof`].
    pub fn read_range(&self, name: &str, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let (store, key) = (self.store.clone(), self.key(name));
        self.run(async move {
            let mut bytes = vec![0; len];
            read_range(&store, &key, offset, &mut bytes).await?;
            Ok(bytes)
        })
    }

    /// The length of an object, and its last bytes.
    ///
    /// # Errors
    /// As for [`Bucket::read`].
    pub fn read_end<const N: usize>(&self, name: &str) -> io::Result<(u64, [u8; N])> {
        let (store, key) = (self.store.clone(), self.key(name));
        self.run(async move {
            // Not the range of a suffix, which Azure does not have.
            let size = store.head(&key).await.map_err(io_error)?.size;
            let short =
                || failed(io::ErrorKind::UnexpectedEof, format!("it has {size} bytes only"));
            let begin = size.checked_sub(N as u64).ok_or_else(short)?;
            let bytes = store.get_range(&key, begin..size).await.map_err(io_error)?;
            Ok((size, *bytes.last_chunk().ok_or_else(short)?))
        })
    }

    /// What is directly in the directory. One that does not exist is empty.
    ///
    /// # Errors
    /// What the store says.
    pub fn list(&self) -> io::Result<Listing> {
        let (store, prefix) = (self.store.clone(), self.prefix.clone());
        self.run(async move {
            let found = store.list_with_delimiter(Some(&prefix)).await.map_err(io_error)?;
            let name = |key: &Key| key.filename().map(str::to_owned);
            let object = |object: &ObjectMeta| Some((name(&object.location)?, object.size));
            // No URL can name the others.
            let has_url = |name: &String| !name.contains(['?', '#']);
            Ok(Listing {
                objects: found.objects.iter().filter_map(object).collect(),
                dirs: found.common_prefixes.iter().filter_map(name).filter(has_url).collect(),
            })
        })
    }

    /// Creates an object, unless there is one of that name.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`]; what the store says.
    pub fn create(&self, name: &str, bytes: Vec<u8>) -> io::Result<()> {
        self.put(name, bytes.into(), PutMode::Create)
    }

    /// Creates an object, in place of one of that name.
    ///
    /// # Errors
    /// What the store says.
    pub fn replace(&self, name: &str, bytes: Vec<u8>) -> io::Result<()> {
        self.put(name, bytes.into(), PutMode::Overwrite)
    }

    /// Creates an object in place of one of that name, if that still has this version.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if it has not; what the store says.
    pub fn replace_version(&self, name: &str, bytes: Vec<u8>, seen: &Version) -> io::Result<()> {
        let seen = UpdateVersion { e_tag: seen.tag.clone(), version: seen.number.clone() };
        match self.put(name, bytes.into(), PutMode::Update(seen)) {
            // It was removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(failed(io::ErrorKind::AlreadyExists, error))
            }
            put => put,
        }
    }

    pub(super) fn put(&self, name: &str, payload: PutPayload, mode: PutMode) -> io::Result<()> {
        let (store, key) = (self.store.clone(), self.key(name));
        self.run(async move {
            let put = store.put_opts(&key, payload, PutOptions::from(mode)).await;
            put.map(drop).map_err(io_error)
        })
    }

    /// The length of an object; `None` if there is none.
    ///
    /// # Errors
    /// What the store says.
    pub fn size(&self, name: &str) -> io::Result<Option<u64>> {
        let (store, key) = (self.store.clone(), self.key(name));
        self.run(async move {
            match store.head(&key).await {
                Ok(found) => Ok(Some(found.size)),
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(io_error(error)),
            }
        })
    }

    /// Removes an object; one that is not there is no error.
    ///
    /// # Errors
    /// What the store says.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let (store, key) = (self.store.clone(), self.key(name));
        self.run(async move {
            match store.delete(&key).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(io_error(error)),
            }
        })
    }
}

impl Bucket {
    /// Removes an object if it still has this version; one that is not there is no error. Without a condition at Azure's store,
    /// whose signatures cover such a header, and at servers that do not know it.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if it has another version; what the store says.
    pub fn remove_version(&self, name: &str, seen: &Version) -> io::Result<()> {
        let (store, key) = (self.store.clone(), self.key(name));
        let condition = match &*self.store {
            Store::S3(_) => seen.tag.clone().map(|tag| ("if-match", tag)),
            Store::Google(_) => {
                seen.number.clone().map(|number| ("x-goog-if-generation-match", number))
            }
            Store::Azure(_) => None,
        };
        let removed = self.run(async move {
            match connect::only_if(condition, store.delete(&key)).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(io_error(error)),
            }
        });
        match removed {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => self.remove(name),
            removed => removed,
        }
    }
}

/// Reads a range of an object into memory, and goes on where it was after an interruption.
async fn read_range(store: &Store, key: &Key, offset: u64, to: &mut [u8]) -> io::Result<()> {
    const ATTEMPTS: usize = 5;
    let (mut done, mut failure) = (0, None);
    for _ in 0..ATTEMPTS {
        match fill(store, key, offset, to, &mut done).await {
            Ok(()) => return Ok(()),
            Err(error) if is_final(&error) => return Err(error),
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.expect("every attempt failed"))
}

/// Whether another attempt would fail, too. The store's own client has repeated what could be repeated.
fn is_final(error: &io::Error) -> bool {
    use io::ErrorKind::{NotFound, PermissionDenied, UnexpectedEof};
    matches!(error.kind(), NotFound | PermissionDenied | UnexpectedEof)
}

async fn fill(
    store: &Store,
    key: &Key,
    offset: u64,
    to: &mut [u8],
    done: &mut usize,
) -> io::Result<()> {
    let range = offset + *done as u64..offset + to.len() as u64;
    let options =
        GetOptions { range: Some(GetRange::Bounded(range.clone())), ..Default::default() };
    let got = in_time(store.get_opts(key, options)).await?;
    if got.range != range {
        let why = format!("the object ends at byte {}", got.range.end);
        return Err(failed(io::ErrorKind::UnexpectedEof, why));
    }
    let mut stream = got.into_stream();
    while let Some(bytes) = in_time(stream.try_next()).await? {
        let bytes: &Bytes = &bytes;
        let room = to.get_mut(*done..*done + bytes.len());
        let room =
            room.ok_or_else(|| io::Error::other("the store sent more than was asked for"))?;
        room.copy_from_slice(bytes);
        *done += bytes.len();
    }
    match *done == to.len() {
        true => Ok(()),
        false => Err(failed(io::ErrorKind::ConnectionAborted, "the store sent less than it said")),
    }
}

/// Waits for the next bytes of a store.
async fn in_time<T>(answer: impl Future<Output = object_store::Result<T>>) -> io::Result<T> {
    match tokio::time::timeout(SILENCE, answer).await {
        Ok(answer) => answer.map_err(io_error),
        Err(_) => {
            let why = format!("the store has been silent for {} s", SILENCE.as_secs());
            Err(failed(io::ErrorKind::TimedOut, why))
        }
    }
}

/// Runs a request until it ends or `stop` is set.
pub(super) async fn unless<T>(
    stop: Option<Arc<AtomicBool>>,
    request: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let mut request = Box::pin(request);
    loop {
        match tokio::time::timeout(TICK, &mut request).await {
            Ok(ended) => return ended,
            Err(_) if stop.as_ref().is_some_and(|stop| stop.load(Relaxed)) => {
                return Err(cancelled());
            }
            Err(_) => {}
        }
    }
}

/// The runtime that requests of this process run on.
static RUNTIME: PerProcess<Option<Arc<Runtime>>> =
    PerProcess::new([const { Mutex::new(None) }; GENERATIONS]);

fn runtime() -> io::Result<Arc<Runtime>> {
    let lost = || io::Error::other("this process is forked too many times");
    let mut kept = RUNTIME.lock().ok_or_else(lost)?;
    if let Some(runtime) = &*kept {
        return Ok(runtime.clone());
    }
    let built = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("ringstow-http")
        .enable_all()
        .build()?;
    Ok(kept.insert(Arc::new(built)).clone())
}

/// Starts a request that says itself how it ended.
pub(super) fn start(request: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    runtime()?.spawn(request);
    Ok(())
}

/// The system's error of the same meaning.
pub(super) fn io_error(error: object_store::Error) -> io::Error {
    use io::ErrorKind;
    use object_store::Error as E;
    let text = answer::deepest(&error);
    let kind = match &error {
        E::NotFound { .. } => ErrorKind::NotFound,
        E::AlreadyExists { .. } | E::Precondition { .. } => ErrorKind::AlreadyExists,
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => ErrorKind::PermissionDenied,
        E::NotSupported { .. } | E::NotImplemented { .. } => ErrorKind::Unsupported,
        E::InvalidPath { .. } => ErrorKind::InvalidInput,
        _ => answer::kind(&text),
    };
    failed(kind, answer::plain(&text))
}

impl From<open::Refused> for Error {
    fn from(refused: open::Refused) -> Self {
        Self::invalid(refused.to_string())
    }
}
