//! A build without object stores says so.

use super::{Listing, Version};
use crate::error::{Error, Result};
use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A directory in an object store: never, in this build.
#[derive(Debug, Clone)]
pub struct Bucket(Infallible);

impl Bucket {
    /// Refuses every URL.
    ///
    /// # Errors
    /// Always.
    pub fn at(url: &Path) -> Result<Self> {
        Err(Error::Unsupported {
            what: format!("{} is in an object store, which this build cannot reach", url.display()),
            remedy:
                "build with the cargo feature `object-store`, or copy the checkpoint to a directory"
                    .into(),
        })
    }

    /// [`Bucket::at`].
    ///
    /// # Errors
    /// Always.
    pub fn retried_by_caller(url: &Path) -> Result<Self> {
        Self::at(url)
    }

    /// Never called.
    pub fn until(self, _: Arc<AtomicBool>) -> Self {
        match self.0 {}
    }

    /// Never called.
    pub fn url(&self) -> &Path {
        match self.0 {}
    }

    /// Never called.
    pub fn read(&self, _: &str, _: u64) -> io::Result<Vec<u8>> {
        match self.0 {}
    }

    /// Never called.
    pub fn read_version(&self, _: &str, _: u64) -> io::Result<(Vec<u8>, Version)> {
        match self.0 {}
    }

    /// Never called.
    pub fn read_end<const N: usize>(&self, _: &str) -> io::Result<(u64, [u8; N])> {
        match self.0 {}
    }

    /// Never called.
    pub fn read_range(&self, _: &str, _: u64, _: usize) -> io::Result<Vec<u8>> {
        match self.0 {}
    }

    /// Never called.
    pub fn create(&self, _: &str, _: Vec<u8>) -> io::Result<()> {
        match self.0 {}
    }

    /// Never called.
    pub fn replace(&self, _: &str, _: Vec<u8>) -> io::Result<()> {
        match self.0 {}
    }

    /// Never called.
    pub fn list(&self) -> io::Result<Listing> {
        match self.0 {}
    }

    /// Never called.
    pub fn remove(&self, _: &str) -> io::Result<()> {
        match self.0 {}
    }

    /// Never called.
    pub fn remove_version(&self, _: &str, _: &Version) -> io::Result<()> {
        match self.0 {}
    }

    /// Never called.
    pub fn begin(&self, _: &str) -> io::Result<String> {
        match self.0 {}
    }

    /// Never called.
    pub fn abort(&self, _: (&str, &str)) -> io::Result<()> {
        match self.0 {}
    }

    pub(super) async fn read_into(&self, _: &str, _: u64, _: &mut [u8]) -> io::Result<()> {
        match self.0 {}
    }
}

pub(super) fn start(_: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

pub(super) async fn unless<T>(
    _: Option<Arc<AtomicBool>>,
    request: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    request.await
}
