//! An object store as the place that a checkpoint is copied to.

use super::patience::Patience;
use super::target::{Paced, Seen, Target, Upload, bytes_of};
use crate::error::{Error, Result};
use crate::format::names;
use crate::object::{Bucket, Payload};
use crate::pipeline::blocks::Checked;
use crate::store::read::object::read_manifest_version;
use std::io;
use std::path::Path;

/// A directory in an object store. Requests are retried while the store does not answer.
pub(super) struct PatientBucket {
    pub bucket: Bucket,
    pub patience: Patience,
}

impl Target for PatientBucket {
    fn place(&self) -> &Path {
        self.bucket.url()
    }

    fn manifest(&self) -> Result<Option<Seen>> {
        let found = self.patience.ask(|| read_manifest_version(&self.bucket))?;
        Ok(found.map(|(manifest, version)| Seen { manifest, version }))
    }

    fn commit(&self, manifest: Vec<u8>, seen: Option<&Seen>) -> Result<()> {
        let put = self.patience.ask(|| match seen {
            Some(seen) => {
                self.bucket.replace_version(names::MANIFEST, manifest.clone(), &seen.version)
            }
            None => self.bucket.create(names::MANIFEST, manifest.clone()),
        });
        put.map_err(|error| Error::io("creating", self.place().join(names::MANIFEST), error))
    }

    fn missing(&self, files: &[(&str, u64)]) -> io::Result<Vec<usize>> {
        if let [(name, bytes)] = files {
            let is_missing = self.patience.ask(|| self.bucket.size(name))? != Some(*bytes);
            return Ok(if is_missing { vec![0] } else { Vec::new() });
        }
        let listed = self.patience.ask(|| self.bucket.list())?;
        let is_missing = |&file: &usize| {
            let (name, bytes) = files[file];
            listed.objects.get(name) != Some(&bytes)
        };
        Ok((0..files.len()).filter(is_missing).collect())
    }

    fn shards(&self) -> io::Result<Vec<String>> {
        let names = self.patience.ask(|| self.bucket.list())?.objects.into_keys();
        Ok(names.filter(|name| names::is_shard(name)).collect())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.patience.ask(|| self.bucket.remove(name))
    }

    fn send(&self, name: &str, blocks: Vec<Checked>, paced: Paced) -> io::Result<()> {
        paced(bytes_of(&blocks));
        let blocks = Payload::of(blocks);
        self.patience.ask(|| self.bucket.upload(name, &blocks))
    }

    fn begin(&self, name: &str, _: u64) -> io::Result<Upload> {
        let id = self.patience.ask(|| self.bucket.begin(name))?;
        Ok(Upload { name: name.into(), id })
    }

    fn put_part(
        &self,
        upload: &Upload,
        (number, _): (usize, u64),
        blocks: Vec<Checked>,
        paced: Paced,
    ) -> io::Result<String> {
        paced(bytes_of(&blocks));
        let blocks = Payload::of(blocks);
        let upload = (&*upload.name, &*upload.id);
        self.patience.ask(|| self.bucket.put_part(upload, number, &blocks))
    }

    fn finish(&self, upload: &Upload, _: u64, parts: Vec<String>) -> io::Result<()> {
        self.patience.ask(|| self.bucket.finish((&upload.name, &upload.id), parts.clone()))
    }

    fn abort(&self, upload: &Upload) -> io::Result<()> {
        self.patience.ask(|| self.bucket.abort((&upload.name, &upload.id)))
    }
}
