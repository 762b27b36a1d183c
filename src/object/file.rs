//! Reads of an object, for loads: like those of a file on an engine.

use super::client::Bucket;
use crate::engine::Action;
use crate::engine::queue::{Outcome, Reply};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// An object that is read in ranges.
#[derive(Debug, Clone)]
pub struct ObjectFile {
    bucket: Arc<Bucket>,
    name: String,
    path: Arc<Path>,
}

impl ObjectFile {
    /// The object of this name.
    pub fn new(bucket: Arc<Bucket>, name: impl Into<String>) -> Self {
        let name = name.into();
        let path = bucket.url().join(&name).into();
        Self { bucket, name, path }
    }

    /// Its URL.
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Starts a read of the first `needed` bytes of a transfer. Nothing else can be done with an object.
    pub fn submit(
        &self,
        action: Action,
        needed: usize,
        abort: Option<Arc<AtomicBool>>,
        reply: Reply,
    ) {
        let Action::Read(mut transfer) = action else { return drop(reply) };
        let (object, started) = (self.clone(), Some(Instant::now()));
        let request = async move {
            let to = &mut transfer.buffer[transfer.start..transfer.start + needed];
            let read = object.bucket.read_into(&object.name, transfer.offset, to);
            let result = super::client::unless(abort, read).await;
            reply.send(Outcome { result, buffer: Some(transfer.buffer), started });
        };
        // A reply that is dropped says that nobody lived to see it.
        let _ = super::client::start(request);
    }
}
