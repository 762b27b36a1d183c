//! The manifest: what a checkpoint holds and where, with a checksum of every block, sealed by a
//! checksum of its own. Reading one checks everything that later code relies on.

use super::cover::{self, Extent};
use super::{Dtype, Shape, TensorInfo, names, seal};
use crate::config::ALIGN;
use crate::error::{Error, Result};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use smallvec::SmallVec;
use std::collections::HashSet;
use std::io::{self, Write};
use std::path::Path;

/// Version of the format that this library writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// As many ranks as a whole may be of: whoever lists those that are missing makes a list of them.
pub(crate) const RANKS_MAX: u32 = 1 << 24;

/// Bytes at a manifest's end that tell it from any other of its length.
pub(crate) const SEAL_LEN: usize = seal::LEN;

const FORMAT: &str = "ringstow";

/// Everything about a checkpoint but the tensors' bytes.
///
/// A manifest that was read has all of its tensors and values in memory. One that is to be written
/// may have them as anything that serializes as these do, and makes them on the way.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest<T = Vec<TensorEntry>, S = Box<RawValue>> {
    /// Always `"ringstow"`.
    pub format: String,
    /// Version of the format.
    pub version: u32,
    /// Version of the library that wrote it.
    pub writer: String,
    /// When it was committed, in milliseconds since 1970-01-01 UTC.
    pub created_unix_ms: u64,
    /// How many times this directory had been saved into before.
    pub generation: u64,
    /// Processes that wrote shards.
    pub world_size: u32,
    /// Bytes of a block: each file is checksummed in runs of this length, the last one shorter.
    pub block_bytes: u64,
    /// The shards.
    pub files: Vec<FileEntry>,
    /// The tensors, in the order in which they were handed over.
    pub tensors: T,
    /// Other directories that the files were striped over, as the writer's configuration named them:
    /// for messages, never to be followed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stripes: Vec<String>,
    /// What it is a part of, where ranks saved each by itself; absent for one that is a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<PartOf>,
    /// The tree of non-tensor values, with references to tensors; see [`Value`](super::Value).
    pub state: S,
}

/// A whole that several ranks saved, each its own part as a checkpoint by itself. Of a tensor that was
/// sharded, a part may hold only some.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartOf {
    /// Whose part this is, from 0 on.
    pub rank: u32,
    /// Ranks that saved.
    pub ranks: u32,
    /// Which save it was: the same text in all parts of one, another in every other into the directory.
    pub save: String,
}

/// A shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the checkpoint's directory.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// CRC-32 (ISO-HDLC, the zip one) of each block; in JSON eight hex digits each, run together.
    #[serde(with = "hex_words")]
    pub crc32: Vec<u32>,
}

/// A tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Unique in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Elements a dimension, of the whole tensor.
    pub shape: Shape,
    /// Where its bytes are. Most tensors have one chunk, which lies in the entry itself.
    pub chunks: SmallVec<[Chunk; 1]>,
    /// Whether it is an opaque byte string rather than a tensor: U8, one dimension.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub object: bool,
}

/// A box of a tensor, dense in row-major order in one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chunk {
    /// Index in [`Manifest::files`].
    pub file: u32,
    /// Offset of its first byte in that file.
    pub begin: u64,
    /// Where in the tensor it starts, one a dimension; absent for a chunk that is all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offsets: Option<Box<[u64]>>,
    /// Its extent, one a dimension; absent for a chunk that is all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sizes: Option<Box<[u64]>>,
}

impl TensorEntry {
    /// Name, type and shape.
    pub fn info(&self) -> TensorInfo {
        TensorInfo { name: self.name.clone(), dtype: self.dtype, shape: self.shape.to_vec() }
    }

    /// Whether chunks, all within the shape, hold no element twice; and where in sum they are as large
    /// as the tensor, therefore all of it.
    fn is_disjoint(&self, is_whole: bool) -> std::result::Result<bool, String> {
        if self.chunks.len() == 1 {
            return Ok(true);
        }
        self.with_boxes(|boxes| match is_whole {
            true => cover::tiles(&self.shape, boxes),
            false => cover::survey(&self.shape, boxes).map(|survey| !survey.overlap),
        })
    }

    fn with_boxes<T>(&self, look: impl FnOnce(&[Extent]) -> T) -> T {
        let zeros = vec![0; self.shape.len()];
        let boxes = self.chunks.iter().map(|Chunk { offsets, sizes, .. }| {
            (offsets.as_deref().unwrap_or(&zeros), sizes.as_deref().unwrap_or(&self.shape))
        });
        look(&boxes.collect::<Vec<Extent>>())
    }

    /// Bytes of the whole tensor. A manifest that was read has only sizes that fit.
    pub fn nbytes(&self) -> u64 {
        self.dtype.nbytes(&self.shape).unwrap_or(0)
    }

    /// Bytes of it that the checkpoint holds: all, but in the [part](PartOf) of one rank.
    pub fn held_bytes(&self) -> u64 {
        let bytes = |chunk: &Chunk| {
            self.dtype.nbytes(chunk.sizes.as_deref().unwrap_or(&self.shape)).unwrap_or(0)
        };
        self.chunks.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// Boxes of it, offsets and sizes, that fill what the checkpoint does not hold. None but in the
    /// [part](PartOf) of one rank.
    pub fn holes(&self) -> Vec<(Vec<u64>, Vec<u64>)> {
        if self.held_bytes() == self.nbytes() {
            return Vec::new();
        }
        // What cannot be surveyed is in no manifest that was read.
        self.with_boxes(|boxes| cover::survey(&self.shape, boxes)).unwrap_or_default().holes
    }
}

impl<T, S> Manifest<T, S> {
    /// A manifest of this version of format and library.
    pub fn new(
        generation: u64,
        world_size: u32,
        block_bytes: u64,
        files: Vec<FileEntry>,
        tensors: T,
        state: S,
    ) -> Self {
        let since_epoch =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self {
            format: FORMAT.into(),
            version: VERSION,
            writer: env!("CARGO_PKG_VERSION").into(),
            created_unix_ms: since_epoch.as_millis() as u64,
            generation,
            world_size,
            block_bytes,
            files,
            tensors,
            stripes: Vec::new(),
            part_of: None,
            state,
        }
    }
}

impl<T: Serialize, S: Serialize> Manifest<T, S> {
    /// The file's bytes: one line of JSON whose last field, `crc32`, seals all that precedes it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot be said in JSON, which would be a bug.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        self.write(&mut text)
            .map_err(|e| Error::invalid(format!("the manifest cannot be written: {e}")))?;
        Ok(text)
    }

    /// Writes what [`Manifest::encode`] returns, piece by piece: of a million tensors it is 150 MB.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn write(&self, to: impl Write) -> io::Result<()> {
        seal::write(self, to)
    }
}

impl Manifest {
    /// Reads and checks a manifest. `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the seal is broken, [`Error::Unsupported`] for a newer version,
    /// [`Error::Format`] for anything that this library would not have written.
    pub fn decode(bytes: Vec<u8>, path: &Path) -> Result<Self> {
        // Takes the text: of a million tensors it is 150 MB, and the check takes memory, too.
        let mut manifest = Self::parse(bytes, path)?;
        manifest.tensors.shrink_to_fit();
        manifest.check().map_err(|reason| Error::format(path, reason))?;
        Ok(manifest)
    }

    /// The files that a manifest lists; what they hold is only passed over.
    ///
    /// # Errors
    /// As for [`Manifest::decode`].
    pub fn decode_files(bytes: Vec<u8>, path: &Path) -> Result<Vec<FileEntry>> {
        let manifest = Manifest::<IgnoredAny, IgnoredAny>::parse(bytes, path)?;
        manifest.check_files().map_err(|reason| Error::format(path, reason))?;
        Ok(manifest.files)
    }
}

impl<T: DeserializeOwned, S: DeserializeOwned> Manifest<T, S> {
    /// Reads a manifest that is sealed and of a version that is known.
    fn parse(mut bytes: Vec<u8>, path: &Path) -> Result<Self> {
        let body_len = seal::check(&bytes, path)?.len();
        bytes.truncate(body_len);
        bytes.push(b'}');
        let manifest: Self =
            serde_json::from_slice(&bytes).map_err(|error| unreadable(&bytes, path, &error))?;
        manifest.check_version(path)?;
        Ok(manifest)
    }
}

impl<T, S> Manifest<T, S> {
    fn check_version(&self, path: &Path) -> Result<()> {
        if self.format != FORMAT {
            return Err(Error::format(
                path,
                format!("format is {:?}, not ringstow's", self.format),
            ));
        }
        match self.version {
            1..=VERSION => Ok(()),
            newer => Err(newer_version(path, newer.into())),
        }
    }

    /// Checks the list of files: names that stay in the directory, each of its own, and as many
    /// checksums as blocks.
    fn check_files(&self) -> std::result::Result<(), String> {
        if !self.block_bytes.is_multiple_of(ALIGN as u64)
            || !(ALIGN as u64..=1 << 30).contains(&self.block_bytes)
        {
            return Err(format!("block_bytes is {}, no multiple of 4096", self.block_bytes));
        }
        self.part_of.as_ref().map_or(Ok(()), PartOf::check)?;
        let mut names = HashSet::new();
        for file in &self.files {
            self.check_file(file)?;
            if !names.insert(&file.name) {
                return Err(format!("two files are named {:?}", file.name));
            }
        }
        Ok(())
    }

    fn check_file(&self, file: &FileEntry) -> std::result::Result<(), String> {
        if !names::is_confined(&file.name) {
            return Err(format!(
                "file name {:?} is refused: a shard is a plain *.safetensors name in the checkpoint's own directory",
                file.name
            ));
        }
        let blocks = file.bytes.div_ceil(self.block_bytes);
        if file.crc32.len() as u64 != blocks {
            return Err(format!(
                "{:?} has {} blocks but {} checksums",
                file.name,
                blocks,
                file.crc32.len()
            ));
        }
        Ok(())
    }
}

impl Manifest {
    /// Checks all that readers rely on: names that stay in the directory, sizes that do not
    /// overflow, chunks that lie in their files and do not overlap. They cover their tensors, but in
    /// one rank's [part](PartOf) of what several saved.
    ///
    /// # Errors
    /// What is wrong, as a sentence.
    pub fn check(&self) -> std::result::Result<(), String> {
        self.check_files()?;
        let mut names = HashSet::with_capacity(self.tensors.len());
        let mut extents = Vec::with_capacity(self.tensors.len());
        for (index, tensor) in self.tensors.iter().enumerate() {
            if !names.insert(&tensor.name) {
                return Err(format!("two tensors are named {:?}", tensor.name));
            }
            self.check_tensor(tensor, |file, begin, end| {
                extents.push((file, begin, end, index));
            })?;
        }
        extents.sort_unstable();
        match extents.windows(2).find(|w| w[0].0 == w[1].0 && w[0].2 > w[1].1) {
            Some(w) => Err(format!(
                "tensors {:?} and {:?} overlap at offset {} of {:?}",
                self.tensors[w[0].3].name,
                self.tensors[w[1].3].name,
                w[1].1,
                self.files[w[0].0 as usize].name
            )),
            None => Ok(()),
        }
    }

    /// Checks a tensor's chunks, and reports each that is not empty as (file, begin, end).
    fn check_tensor(
        &self,
        tensor: &TensorEntry,
        mut extent: impl FnMut(u32, u64, u64),
    ) -> std::result::Result<(), String> {
        let name = &tensor.name;
        let whole = tensor.dtype.nbytes(&tensor.shape).ok_or_else(|| {
            format!("tensor {name:?}: shape {:?} of {} overflows", tensor.shape, tensor.dtype)
        })?;
        let mut held = 0u64;
        for chunk in &tensor.chunks {
            let bytes = chunk_bytes(tensor, chunk)
                .ok_or_else(|| format!("tensor {name:?}: a chunk reaches outside of its shape"))?;
            let file = self.files.get(chunk.file as usize).ok_or_else(|| {
                format!("tensor {name:?}: there is no file number {}", chunk.file)
            })?;
            let end =
                chunk.begin.checked_add(bytes).filter(|&end| end <= file.bytes).ok_or_else(
                    || {
                        format!(
                            "tensor {name:?}: {bytes} bytes at offset {} do not fit in {:?} of {} bytes",
                            chunk.begin, file.name, file.bytes
                        )
                    },
                )?;
            held = held.saturating_add(bytes);
            if bytes > 0 {
                extent(chunk.file, chunk.begin, end);
            }
        }
        if tensor.object && (tensor.dtype, tensor.shape.len()) != (Dtype::U8, 1) {
            return Err(format!("{name:?} is an object, but no byte string"));
        }
        self.check_cover(tensor, held, whole)
    }

    /// Checks that chunks which hold `held` of the `whole` bytes are all of their tensor, each element
    /// once; of a rank's part, only that they hold none twice.
    fn check_cover(
        &self,
        tensor: &TensorEntry,
        held: u64,
        whole: u64,
    ) -> std::result::Result<(), String> {
        let name = &tensor.name;
        // Of what one rank saved alone, nobody else has the rest.
        let may_lack = !tensor.object && self.part_of.as_ref().is_some_and(|of| of.ranks > 1);
        if tensor.chunks.is_empty() || held > whole || (held < whole && !may_lack) {
            return Err(format!("tensor {name:?}: its chunks hold {held} of {whole} bytes"));
        }
        match tensor.is_disjoint(held == whole) {
            Ok(true) => Ok(()),
            // If the sum is right, something is held twice where there is a hole.
            Ok(false) => Err(format!("tensor {name:?}: its chunks overlap each other")),
            Err(why) => Err(format!("tensor {name:?}: its {why}")),
        }
    }
}

impl PartOf {
    /// What a manifest says that it is a part of, with nothing else of it kept or checked, its seal neither. `None`
    /// also where that cannot be read.
    pub(crate) fn noted_in(manifest: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Noted {
            part_of: Option<PartOf>,
        }
        serde_json::from_slice::<Noted>(manifest).ok()?.part_of
    }

    fn check(&self) -> std::result::Result<(), String> {
        let Self { rank, ranks, .. } = self;
        if rank >= ranks {
            return Err(format!("part_of is rank {rank} of {ranks}, which are counted from 0"));
        }
        if *ranks > RANKS_MAX {
            return Err(format!("part_of is of {ranks} ranks, more than {RANKS_MAX}"));
        }
        Ok(())
    }
}

/// Bytes of a chunk; `None` if it does not lie within its tensor.
fn chunk_bytes(tensor: &TensorEntry, chunk: &Chunk) -> Option<u64> {
    match (&chunk.offsets, &chunk.sizes) {
        (None, None) => tensor.dtype.nbytes(&tensor.shape),
        (Some(offsets), Some(sizes)) => {
            let inside = cover::within(&tensor.shape, (offsets, sizes));
            inside.then(|| tensor.dtype.nbytes(sizes)).flatten()
        }
        _ => None,
    }
}

/// Why JSON that is no manifest of ours was refused: a newer version where it says so.
fn unreadable(text: &[u8], path: &Path, error: &serde_json::Error) -> Error {
    #[derive(Deserialize)]
    struct Version {
        version: u64,
    }
    match serde_json::from_slice::<Version>(text) {
        Ok(Version { version }) if version > VERSION.into() => newer_version(path, version),
        _ => Error::format(path, format!("is no manifest of ringstow: {error}")),
    }
}

fn newer_version(path: &Path, version: u64) -> Error {
    Error::Unsupported {
        what: format!(
            "{} is of format version {version}, this library reads up to version {VERSION}",
            path.display()
        ),
        remedy: "upgrade ringstow".into(),
    }
}

/// A list of 32-bit words as one string of hex digits.
mod hex_words {
    use super::*;
    use serde::de::Error as _;

    pub fn serialize<S: Serializer>(words: &[u32], to: S) -> std::result::Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(words.len() * 8);
        for word in words {
            use std::fmt::Write as _;
            let _ = write!(text, "{word:08x}");
        }
        to.serialize_str(&text)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> std::result::Result<Vec<u32>, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(from)?;
        if !text.len().is_multiple_of(8) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(D::Error::custom("checksums are eight hex digits a block"));
        }
        (0..text.len() / 8)
            .map(|i| u32::from_str_radix(&text[i * 8..i * 8 + 8], 16).map_err(D::Error::custom))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smallvec::smallvec;

    fn sample() -> Manifest {
        let file = |name: &str, bytes: u64| FileEntry {
            name: name.into(),
            bytes,
            crc32: vec![0xdead_beef; bytes.div_ceil(8192) as usize],
        };
        let tensor = |name: &str, shape: &[u64], file, begin| TensorEntry {
            name: name.into(),
            dtype: Dtype::F32,
            shape: shape.into(),
            chunks: [Chunk { file, begin, offsets: None, sizes: None }].into(),
            object: false,
        };
        Manifest::new(
            3,
            1,
            8192,
            vec![file("a.safetensors", 20000), file("b.safetensors", 4096)],
            vec![
                tensor("w", &[10, 20], 0, 4096),
                tensor("b", &[20], 0, 4896),
                tensor("none", &[0, 1 << 60], 1, 4096),
            ],
            RawValue::from_string("{\"w\":1}".into()).unwrap(),
        )
    }

    fn decode(manifest: &Manifest) -> Result<Manifest> {
        Manifest::decode(manifest.encode().unwrap(), Path::new("m"))
    }

    fn sealed(text: &[u8]) -> Vec<u8> {
        [text, seal::of(crc32fast::hash(text)).as_bytes()].concat()
    }

    /// The reason for which a changed manifest is refused.
    fn refused(change: impl FnOnce(&mut Manifest)) -> String {
        let mut manifest = sample();
        change(&mut manifest);
        match decode(&manifest) {
            Err(Error::Format { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let (manifest, read) = (sample(), decode(&sample()).unwrap());
        assert_eq!(read.files, manifest.files);
        assert_eq!(read.tensors, manifest.tensors);
        assert_eq!(read.state.get(), manifest.state.get());
        assert_eq!(read.generation, 3);
    }

    #[test]
    fn what_it_is_a_part_of_is_read_and_a_whole_says_nothing_of_it() {
        let mut manifest = sample();
        assert!(!String::from_utf8(manifest.encode().unwrap()).unwrap().contains("part_of"));
        assert_eq!(decode(&manifest).unwrap().part_of, None);
        manifest.part_of = Some(PartOf { rank: 1, ranks: 4, save: "5e-1".into() });
        let text = String::from_utf8(manifest.encode().unwrap()).unwrap();
        assert!(text.contains(r#""part_of":{"rank":1,"ranks":4,"save":"5e-1"}"#), "{text}");
        assert_eq!(decode(&manifest).unwrap().part_of, manifest.part_of);
        assert_eq!(PartOf::noted_in(text.as_bytes()), manifest.part_of);
    }

    #[test]
    fn who_only_asks_what_a_manifest_is_a_part_of_is_told_of_no_damage() {
        for (manifest, noted) in [
            (r#"{"part_of": {"rank": 1, "ranks": 2, "save": "a"}, "state": {}}"#, true),
            (r#"{"state": {"part_of": {"rank": 1, "ranks": 2, "save": "a"}}}"#, false),
            (r#"{"part_of": {"rank": 1"#, false),
            (r#"{"part_of": []}"#, false),
            (r#"{"part_of": {}}"#, false),
            ("", false),
        ] {
            let part_of = PartOf { rank: 1, ranks: 2, save: "a".into() };
            let expected = noted.then_some(part_of);
            assert_eq!(PartOf::noted_in(manifest.as_bytes()), expected, "{manifest}");
        }
    }

    #[test]
    fn every_flipped_bit_is_seen() {
        let bytes = sample().encode().unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(
                Manifest::decode(flipped, Path::new("m")),
                Err(Error::Corrupt { .. })
            ));
        }
        for len in 0..bytes.len() {
            assert!(Manifest::decode(bytes[..len].to_vec(), Path::new("m")).is_err());
        }
    }

    #[test]
    fn hostile_manifests_are_refused_with_the_reason() {
        assert!(refused(|m| m.files[0].name = "../../x.safetensors".into()).contains("refused"));
        assert!(refused(|m| m.files[0].name = "/etc/x.safetensors".into()).contains("refused"));
        assert!(refused(|m| m.files[1].name = m.files[0].name.clone()).contains("two files"));
        assert!(refused(|m| m.tensors[1].name = "w".into()).contains("two tensors"));
        assert!(refused(|m| m.tensors[1].chunks[0].begin = 4892).contains("overlap"));
        assert!(refused(|m| m.tensors[1].chunks[0].begin = u64::MAX - 4).contains("do not fit"));
        assert!(refused(|m| m.tensors[1].shape = smallvec![1 << 38]).contains("do not fit"));
        assert!(
            refused(|m| m.tensors[1].shape = smallvec![1 << 40, 1 << 40]).contains("overflows")
        );
        assert!(refused(|m| m.tensors[1].chunks[0].file = 2).contains("no file number 2"));
        assert!(refused(|m| m.tensors[1].chunks.clear()).contains("0 of 80 bytes"));
        assert!(refused(|m| m.files[0].crc32.clear()).contains("checksums"));
        assert!(refused(|m| m.files[0].bytes = 1 << 63).contains("checksums"));
        assert!(refused(|m| m.block_bytes = 0).contains("block_bytes"));
        assert!(refused(|m| m.format = "other".into()).contains("other"));
        assert!(refused(|m| m.tensors[1].object = true).contains("no byte string"));
        let part_of = |rank, ranks| Some(PartOf { rank, ranks, save: "a".into() });
        assert!(refused(|m| m.part_of = part_of(2, 2)).contains("rank 2 of 2"));
        assert!(refused(|m| m.part_of = part_of(0, 0)).contains("rank 0 of 0"));
        assert!(refused(|m| m.part_of = part_of(0, u32::MAX)).contains("more than"));
    }

    #[test]
    fn chunks_must_lie_in_their_tensor_and_cover_it() {
        let boxed = |offsets: &[u64], sizes: &[u64]| Chunk {
            file: 0,
            begin: 4096,
            offsets: Some(offsets.into()),
            sizes: Some(sizes.into()),
        };
        let refused_chunk = |chunk: Chunk| refused(|m| m.tensors[0].chunks = smallvec![chunk]);
        assert!(refused_chunk(boxed(&[5, 0], &[6, 20])).contains("outside"));
        assert!(refused_chunk(boxed(&[u64::MAX, 0], &[2, 20])).contains("outside"));
        assert!(refused_chunk(boxed(&[0], &[10])).contains("outside"));
        assert!(refused_chunk(boxed(&[0, 0], &[5, 20])).contains("400 of 800"));
        let twice =
            smallvec![boxed(&[0, 0], &[5, 20]), Chunk { begin: 8192, ..boxed(&[4, 0], &[5, 20]) }];
        assert!(refused(|m| m.tensors[0].chunks = twice).contains("overlap each other"));
    }

    /// The sample as rank 1's part of two, whose first tensor, of [10, 20], has these boxes: rows
    /// and how many, columns and how many.
    fn part(boxes: &[[u64; 4]]) -> Manifest {
        let mut manifest = sample();
        manifest.part_of = Some(PartOf { rank: 1, ranks: 2, save: "a".into() });
        let mut begin = 5000;
        let chunk = |&[row, rows, column, columns]: &[u64; 4]| {
            let sizes = Some([rows, columns].into());
            begin += 800;
            Chunk { file: 0, begin, offsets: Some([row, column].into()), sizes }
        };
        manifest.tensors[0].chunks = boxes.iter().map(chunk).collect();
        manifest
    }

    #[test]
    fn a_part_may_hold_only_some_of_a_tensor_and_a_whole_may_not() {
        for (boxes, held, holes) in [
            (&[[5, 5, 0, 20]][..], 400, &[[0, 5, 0, 20]][..]),
            (&[[10, 0, 0, 20]], 0, &[[0, 10, 0, 20]]),
            (&[[0, 0, 0, 20], [2, 8, 0, 20]], 640, &[[0, 2, 0, 20]]),
            (&[[0, 5, 10, 10], [5, 5, 0, 10]], 400, &[[0, 5, 0, 10], [5, 5, 10, 10]]),
            (&[[0, 10, 0, 20]], 800, &[]),
        ] {
            let mut manifest = part(boxes);
            let read = decode(&manifest).unwrap();
            assert_eq!(read.tensors[0].held_bytes(), held);
            let holes: Vec<(Vec<u64>, Vec<u64>)> =
                holes.iter().map(|[r, rs, c, cs]| (vec![*r, *c], vec![*rs, *cs])).collect();
            assert_eq!(read.tensors[0].holes(), holes);
            for part_of in [None, Some(PartOf { rank: 0, ranks: 1, save: "a".into() })] {
                manifest.part_of = part_of;
                match decode(&manifest) {
                    Ok(_) => assert_eq!(held, 800),
                    Err(error) => assert!(error.to_string().contains("of 800 bytes"), "{error}"),
                }
            }
        }
    }

    #[test]
    fn what_a_part_holds_it_holds_once_and_its_objects_are_whole() {
        let refused = |manifest: &Manifest| decode(manifest).unwrap_err().to_string();
        let twice = part(&[[0, 2, 0, 20], [1, 2, 0, 20]]);
        assert!(refused(&twice).contains("overlap each other"));
        assert!(refused(&part(&[[0, 10, 0, 20], [1, 0, 0, 20], [1, 1, 0, 1]])).contains("804 of"));
        assert!(refused(&part(&[[5, 6, 0, 20]])).contains("outside"));
        assert!(refused(&part(&[])).contains("0 of 800"));
        let mut object = part(&[[5, 5, 0, 20]]);
        let entry = &mut object.tensors[0];
        (entry.dtype, entry.shape, entry.object) = (Dtype::U8, smallvec![20], true);
        entry.chunks[0].offsets = Some([5].into());
        entry.chunks[0].sizes = Some([5].into());
        assert!(refused(&object).contains("5 of 20 bytes"));
        // Very many boxes that lie across each other are not looked through.
        let mut crossed = part(&[]);
        crossed.files[0].bytes = 1 << 30;
        crossed.files[0].crc32 = vec![0; 1 << 17];
        let entry = &mut crossed.tensors[0];
        entry.shape = smallvec![4000, 4000];
        entry.chunks = (0..2000u64)
            .map(|i| {
                let (begin, row) = (8192 + i * 16000, i % 2 == 0);
                let offsets = if row { [i, 0] } else { [0, i] };
                let sizes = if row { [1, 4000] } else { [4000, 1] };
                Chunk { file: 0, begin, offsets: Some(offsets.into()), sizes: Some(sizes.into()) }
            })
            .collect();
        assert!(refused(&crossed).contains("more than can be checked"));
    }

    #[test]
    fn a_newer_version_asks_for_an_upgrade_even_if_its_fields_are_new() {
        let text = br#"{"format":"ringstow","version":2,"layout":"columns""#;
        let sealed = sealed(text);
        let error = Manifest::decode(sealed, Path::new("m")).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("version 2"));
    }

    #[test]
    fn duplicate_fields_are_refused() {
        let text = sample().encode().unwrap();
        let body = seal::check(&text, Path::new("m")).unwrap();
        let doubled = sealed(&[body, br#","generation":9"#.as_slice()].concat());
        let error = Manifest::decode(doubled, Path::new("m")).unwrap_err();
        assert!(error.to_string().contains("duplicate"), "{error}");
    }
}
