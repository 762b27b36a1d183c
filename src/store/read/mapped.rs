//! Tensors as views of their files: nothing is read before it is touched.

use crate::error::{Error, Result};
use crate::object::is_url;
use crate::pipeline::load::{FileOwner, open_shard};
use crate::pipeline::report::{LoadReport, LoadSeconds, Moved};
use crate::store::read::checkpoint::Checkpoint;
use crate::store::read::places::lies_straight;
use crate::sys::file;
use crate::sys::file_mapping::FileMapping;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// A tensor in a mapped file.
#[derive(Debug, Clone)]
pub struct MappedTensor {
    /// The file, which all of its tensors share.
    pub file: Arc<FileMapping>,
    /// Its bytes in the file, dense and in row-major order, aligned to the dtype.
    pub range: Range<usize>,
}

/// Tensors in mapped files.
#[derive(Debug)]
pub struct Mapped {
    /// In the order of the names; `None` for one that is in several parts, or not aligned to its type: it must be read.
    pub tensors: Vec<Option<MappedTensor>>,
    /// What was mapped. Nothing was read or checked.
    pub report: LoadReport,
}

impl Checkpoint {
    /// Maps the files of these tensors, copied on write, and returns each tensor's place in them. Reads no tensor: a byte is
    /// read when it is touched, and nothing checks it then.
    ///
    /// The memory keeps the bytes of this save, also if it is removed or replaced. It does not, if another program writes to
    /// the files or cuts them; a byte that is cut off, or that the disk cannot read, is a SIGBUS.
    ///
    /// # Errors
    /// As for [`Checkpoint::load_names`], without damage; [`Error::Unsupported`] for files in an object store;
    /// [`Error::MissingFiles`] for a file that was cut since the checkpoint was opened.
    #[doc(hidden)]
    pub fn map<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> Result<Mapped> {
        let started = Instant::now();
        let requests = self.find(names)?;
        self.check_whole(&requests)?;
        let mut files = BTreeMap::new();
        for request in requests.iter().filter(|request| lies_straight(request.entry)) {
            if request.entry.nbytes() > 0 {
                files.insert(request.entry.chunks[0].file as usize, None);
            }
        }
        for (&number, mapping) in &mut files {
            *mapping = Some(Arc::new(self.map_file(number)?));
        }
        self.check_same(true)?;
        let is_used = |(number, file): (usize, _)| files.contains_key(&number).then_some(file);
        let paths: Vec<Option<&Path>> = self.shard_paths().enumerate().map(is_used).collect();
        self.check_copies(&paths)?;
        let place = |number: usize, begin: u64, nbytes: u64| {
            let file = files.get(&number).cloned().flatten()?;
            let start = usize::try_from(begin).ok()?;
            let range = start..start.checked_add(usize::try_from(nbytes).ok()?)?;
            (range.end <= file.len()).then_some(MappedTensor { file, range })
        };
        let tensors: Vec<Option<MappedTensor>> = requests
            .iter()
            .map(|request| match lies_straight(request.entry) {
                true => {
                    let chunk = &request.entry.chunks[0];
                    place(chunk.file as usize, chunk.begin, request.entry.nbytes())
                }
                false => None,
            })
            .collect();
        let mapped = tensors.iter().flatten();
        let report = LoadReport {
            path: self.path().into(),
            step: self.manifest().step,
            dropped: self.manifest().dropped.clone(),
            tensors: mapped.clone().count(),
            tensor_bytes: mapped.map(|tensor| tensor.range.len() as u64).sum(),
            read_bytes: 0,
            cached_bytes: 0,
            received_bytes: 0,
            verified: false,
            moved: Moved { engine: "mmap".into(), ..Moved::default() },
            seconds: LoadSeconds { total: started.elapsed().as_secs_f64(), ..Default::default() },
            damaged: Vec::new(),
        };
        Ok(Mapped { tensors, report })
    }

    fn map_file(&self, number: usize) -> Result<FileMapping> {
        let shard = &self.files[number];
        if is_url(&shard.path) {
            let what =
                format!("{} is in an object store, and cannot be mapped", self.path().display());
            return Err(Error::Unsupported { what, remedy: "load it without mmap".into() });
        }
        let opened = open_shard(shard, false);
        let file = opened.map_err(|error| Error::io("opening", &shard.path, error))?;
        let bytes =
            file::look(&file).map_err(|error| Error::io("looking at", &shard.path, error))?.len();
        if bytes < shard.bytes {
            let name = shard.path.file_name().unwrap_or_default().to_string_lossy();
            let reason = format!(
                "{name} has {bytes} bytes, and had {} when it was opened: another program has cut it",
                shard.bytes
            );
            return Err(Error::MissingFiles { path: self.path().into(), reason });
        }
        FileMapping::new(&file, shard.bytes)
            .map_err(|error| Error::io("mapping", &shard.path, error))
    }
}
