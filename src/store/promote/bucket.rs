//! An object store as the place that a checkpoint is copied to.

use super::target::{Target, Upload};
use crate::error::{Error, Result};
use crate::format::names;
use crate::object::Bucket;
use crate::pipeline::blocks::Checked;
use crate::store::read::object::read_manifest;
use crate::sys::lock::DirLock;
use std::io;
use std::path::Path;

impl Target for Bucket {
    fn place(&self) -> &Path {
        self.url()
    }

    /// A store has no locks.
    fn hold(&self) -> Result<Option<DirLock>> {
        Ok(None)
    }

    fn manifest(&self) -> Result<Option<Vec<u8>>> {
        read_manifest(self)
    }

    fn commit(&self, manifest: Vec<u8>, replaces: bool) -> Result<()> {
        let put = match replaces {
            true => self.replace(names::MANIFEST, manifest),
            false => self.create(names::MANIFEST, manifest),
        };
        put.map_err(|error| Error::io("creating", self.url().join(names::MANIFEST), error))
    }

    /// A store answers once that is so.
    fn settle(&self, _: &[String]) -> Result<()> {
        Ok(())
    }

    fn missing(&self, files: &[(&str, u64)]) -> io::Result<Vec<usize>> {
        if let [(name, bytes)] = files {
            let is_missing = self.size(name)? != Some(*bytes);
            return Ok(if is_missing { vec![0] } else { Vec::new() });
        }
        let listed = self.list()?;
        let is_missing = |&file: &usize| {
            let (name, bytes) = files[file];
            listed.objects.get(name) != Some(&bytes)
        };
        Ok((0..files.len()).filter(is_missing).collect())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.remove(name)
    }

    fn send(&self, name: &str, blocks: Vec<Checked>) -> io::Result<()> {
        self.upload(name, blocks)
    }

    fn begin(&self, name: &str, _: u64) -> io::Result<Upload> {
        Ok(Upload { name: name.into(), id: self.begin(name)? })
    }

    fn put_part(
        &self,
        upload: &Upload,
        (number, _): (usize, u64),
        blocks: Vec<Checked>,
    ) -> io::Result<String> {
        self.put_part((&upload.name, &upload.id), number, blocks)
    }

    fn keeps(&self, _: &str) -> bool {
        true
    }

    fn finish(&self, upload: &Upload, _: u64, parts: Vec<String>) -> io::Result<()> {
        self.finish((&upload.name, &upload.id), parts)
    }

    fn abort(&self, upload: &Upload) -> io::Result<()> {
        self.abort((&upload.name, &upload.id))
    }
}
