//! The manifest: what a checkpoint holds and where, with a checksum of every chunk and a trailer checksum of its own.
//! Reading a manifest checks everything that later code relies on.

mod check;
mod chunk;
mod node;
mod place;
mod rank_share;
mod slim;
mod tensor;

use super::{ChunkHash, Metrics, content_hash, lists, metrics, names, trailer};
use crate::error::{Error, Result};
use crate::limits::{DROPPED_MAX, STRIPES_MAX};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use std::io::{self, Write};
use std::path::Path;

pub use chunk::Chunk;
pub use node::Node;
pub use place::{Age, Head, Order, Place};
pub(crate) use place::{SaveId, numbers};
pub(crate) use rank_share::RANKS_MAX;
pub use rank_share::RankShare;
pub use slim::Dropped;
pub use tensor::TensorEntry;

/// Version of the format that this library writes, and the newest that it reads.
pub const VERSION: u32 = 1;

/// Bytes at a manifest's end that distinguish it from another of the same length.
pub(crate) const TRAILER_LEN: usize = trailer::LEN;

const FORMAT: &str = "ringstow";

/// How each manifest begins.
const START: &str = r#"{"format":"ringstow""#;

/// Everything about a checkpoint except the tensors' bytes.
///
/// A manifest that was read has all tensors and values in memory. For writing, `T` and `S` may be anything that
/// serializes in the same way, so that they can be created while they are written.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[serde(bound(deserialize = "T: Tensors, S: Deserialize<'de>"))]
pub struct Manifest<T = Vec<TensorEntry>, S = Box<RawValue>> {
    /// Always `"ringstow"`.
    pub format: String,
    /// Version of the format.
    pub version: u32,
    /// Version of the library that wrote it.
    pub writer: String,
    /// When it was committed, in milliseconds since 1970-01-01 UTC.
    pub created_unix_ms: u64,
    /// Number of earlier saves into this directory; more on a file system that hosts share.
    pub generation: u64,
    /// Processes that wrote shards.
    pub world_size: u32,
    /// Bytes of a checksum chunk; the last chunk of a file may be shorter.
    pub block_bytes: u64,
    /// The step of training that it was saved as; absent if the caller gave none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Where it stands among the saves of its run; absent in what is no step, and in what was saved before there were places.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// The shards.
    #[serde(deserialize_with = "lists::entries")]
    pub files: Vec<FileEntry>,
    /// The tensors, in the order of the saved state.
    #[serde(deserialize_with = "T::read")]
    pub tensors: T,
    /// Other directories that the files were striped over, as in the writer's configuration. Only for messages; readers
    /// never open them.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "lists::few::<_, STRIPES_MAX>"
    )]
    pub stripes: Vec<String>,
    /// Which rank's share of which save this is, in a rank checkpoint; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<RankShare>,
    /// The nodes that wrote it, if no directory has all of its files; empty otherwise.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "lists::entries")]
    pub nodes: Vec<Node>,
    /// The metrics that it was saved with; absent if there are none.
    #[serde(default, skip_serializing_if = "Metrics::is_empty", with = "metrics")]
    pub metrics: Metrics,
    /// Names below which [`Store::slim`](crate::Store::slim) has dropped everything.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "lists::few::<_, DROPPED_MAX>"
    )]
    pub dropped: Vec<String>,
    /// The tree of non-tensor values, with references to tensors; see [`Value`](super::Value).
    pub state: S,
}

/// A shard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name in the checkpoint's directory.
    pub name: String,
    /// Length of the file.
    pub bytes: u64,
    /// CRC-32 (ISO-HDLC, as in zip) of each checksum chunk. In JSON one string, eight hex digits per chunk.
    #[serde(with = "hex_words")]
    pub crc32: Vec<u32>,
    /// Hashes of its tensor chunks, by rising offset, if the save asked for them. Those of empty ones are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty", with = "content_hash")]
    pub hashes: Vec<ChunkHash>,
}

impl lists::Entry for FileEntry {
    fn count_dims(&self, _: &mut lists::LongDims) -> std::result::Result<(), String> {
        Ok(())
    }
}

/// What a manifest's list of tensors can be read as.
pub trait Tensors: Sized {
    /// Reads the list.
    ///
    /// # Errors
    /// It is not a list of tensors.
    fn read<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error>;
}

impl Tensors for Vec<TensorEntry> {
    fn read<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        lists::entries(from)
    }
}

impl Tensors for IgnoredAny {
    fn read<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        Self::deserialize(from)
    }
}

impl<T, S> Manifest<T, S> {
    /// A manifest with this library's version and format version. Its writer sets the time.
    pub fn new(
        generation: u64,
        world_size: u32,
        block_bytes: u64,
        files: Vec<FileEntry>,
        tensors: T,
        state: S,
    ) -> Self {
        Self {
            format: FORMAT.into(),
            version: VERSION,
            writer: env!("CARGO_PKG_VERSION").into(),
            created_unix_ms: 0,
            generation,
            world_size,
            block_bytes,
            files,
            tensors,
            stripes: Vec::new(),
            part_of: None,
            nodes: Vec::new(),
            step: None,
            place: None,
            metrics: Metrics::new(),
            dropped: Vec::new(),
            state,
        }
    }
}

impl<T, S> Manifest<T, S> {
    /// The same with other files, tensors and values.
    pub fn with<U, V>(&self, files: Vec<FileEntry>, tensors: U, state: V) -> Manifest<U, V> {
        Manifest {
            format: self.format.clone(),
            version: self.version,
            writer: self.writer.clone(),
            created_unix_ms: self.created_unix_ms,
            generation: self.generation,
            world_size: self.world_size,
            block_bytes: self.block_bytes,
            step: self.step,
            place: self.place.clone(),
            files,
            tensors,
            stripes: self.stripes.clone(),
            part_of: self.part_of.clone(),
            nodes: self.nodes.clone(),
            metrics: self.metrics.clone(),
            dropped: self.dropped.clone(),
            state,
        }
    }
}

impl<T: Serialize, S: Serialize> Manifest<T, S> {
    /// The file's bytes: one line of JSON whose last field, `crc32`, covers everything before it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it cannot be written as JSON, which would be a bug.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        self.write(&mut text)
            .map_err(|e| Error::invalid(format!("the manifest cannot be written: {e}")))?;
        Ok(text)
    }

    /// Writes what [`Manifest::encode`] returns, piece by piece: a million tensors take 150 MB.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn write(&self, to: impl Write) -> io::Result<()> {
        trailer::write(self, to)
    }
}

impl Manifest {
    /// Reads and checks a manifest. `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the trailer checksum does not match, [`Error::Unsupported`] for a newer version,
    /// [`Error::Format`] for anything that this library would not have written.
    pub fn decode(bytes: Vec<u8>, path: &Path) -> Result<Self> {
        // Frees the text before the check, which needs memory too: a million tensors take 150 MB.
        let mut manifest = Self::parse(bytes, path)?;
        manifest.tensors.shrink_to_fit();
        manifest.check().map_err(|reason| Error::format(path, reason))?;
        Ok(manifest)
    }

    /// Reads only the files that a manifest lists, and skips tensors and values.
    ///
    /// # Errors
    /// As for [`Manifest::decode`].
    pub fn decode_files(bytes: Vec<u8>, path: &Path) -> Result<Listed> {
        let manifest = Listed::parse(bytes, path)?;
        manifest.check_files().map_err(|reason| Error::format(path, reason))?;
        Ok(manifest)
    }
}

/// A manifest without its tensors and values.
pub type Listed = Manifest<IgnoredAny, IgnoredAny>;

impl Listed {
    /// The first generation that no listed name uses.
    pub fn next_generation(&self) -> u64 {
        let of_names = self.files.iter().map(|file| names::generation(&file.name));
        of_names.max().unwrap_or_default().max(self.generation).saturating_add(1)
    }
}

impl<T: Tensors, S: DeserializeOwned> Manifest<T, S> {
    /// Reads a manifest whose trailer checksum matches and whose version is known.
    fn parse(mut bytes: Vec<u8>, path: &Path) -> Result<Self> {
        let body_len = trailer::check(&bytes, path)?.len();
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
}

/// Whether a text begins or ends as each manifest does. One that is damaged in one place still does.
pub(crate) fn is_marked(text: &str) -> bool {
    // Somebody may have formatted it.
    let start = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).take(START.len());
    start.eq(START.bytes()) || trailer::is_at_end(text)
}

/// The error for JSON that is not a manifest: a newer version if it has one.
fn unreadable(text: &[u8], path: &Path, error: &serde_json::Error) -> Error {
    #[derive(Deserialize)]
    struct Version {
        version: u64,
    }
    match serde_json::from_slice::<Version>(text) {
        Ok(Version { version }) if version > VERSION.into() => newer_version(path, version),
        _ => Error::format(path, format!("is not a manifest of ringstow: {error}")),
    }
}

fn newer_version(path: &Path, version: u64) -> Error {
    Error::Unsupported {
        what: format!(
            "{} has format version {version}; this library reads up to version {VERSION}",
            path.display()
        ),
        remedy: "upgrade ringstow".into(),
    }
}

/// A list of 32-bit words as one string of hex digits.
pub(super) mod hex_words {
    use super::*;
    use serde::de::Error as _;

    pub fn serialize<S: Serializer>(words: &[u32], to: S) -> std::result::Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(words.len() * 8);
        for word in words {
            let digit = |at: u32| char::from(b"0123456789abcdef"[(word >> (4 * at)) as usize % 16]);
            text.extend((0..8).rev().map(digit));
        }
        to.serialize_str(&text)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> std::result::Result<Vec<u32>, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(from)?;
        if !text.len().is_multiple_of(8) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(D::Error::custom("checksums are eight hex digits per chunk"));
        }
        (0..text.len() / 8)
            .map(|i| u32::from_str_radix(&text[i * 8..i * 8 + 8], 16).map_err(D::Error::custom))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Dtype;

    pub(super) fn sample() -> Manifest {
        let file = |name: &str, bytes: u64| FileEntry {
            name: name.into(),
            bytes,
            crc32: vec![0xdead_beef; bytes.div_ceil(8192) as usize],
            hashes: Vec::new(),
        };
        let tensor = |name: &str, shape: &[u64], file, begin| TensorEntry {
            name: name.into(),
            dtype: Dtype::F32,
            shape: shape.into(),
            chunks: [Chunk::whole(file, begin)].into(),
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

    pub(super) fn decode(manifest: &Manifest) -> Result<Manifest> {
        Manifest::decode(manifest.encode().unwrap(), Path::new("m"))
    }

    #[test]
    fn encode_decode_round_trip() {
        let (manifest, read) = (sample(), decode(&sample()).unwrap());
        assert_eq!(read.files, manifest.files);
        assert_eq!(read.tensors, manifest.tensors);
        assert_eq!(read.state.get(), manifest.state.get());
        assert_eq!(read.generation, 3);
    }

    #[test]
    fn hashes_round_trip_and_are_absent_by_default() {
        let mut manifest = sample();
        assert!(!String::from_utf8(manifest.encode().unwrap()).unwrap().contains("hashes"));
        let hash = |begin, hash| ChunkHash { begin, hash };
        manifest.files[0].hashes = vec![hash(4096, 7), hash(4896, u128::MAX)];
        let text = String::from_utf8(manifest.encode().unwrap()).unwrap();
        assert!(text.contains(r#""hashes":"0000000000001000"#), "{text}");
        assert_eq!(decode(&manifest).unwrap().files, manifest.files);
        let cut = text.replace("00000000000000070000", "000000000000000700");
        assert!(Manifest::decode(cut.into(), Path::new("m")).is_err());
        manifest.files[0].hashes.reverse();
        assert!(decode(&manifest).is_err());
    }

    #[test]
    fn part_of_round_trips_and_is_absent_by_default() {
        let mut manifest = sample();
        assert!(!String::from_utf8(manifest.encode().unwrap()).unwrap().contains("part_of"));
        assert_eq!(decode(&manifest).unwrap().part_of, None);
        manifest.part_of = Some(RankShare { rank: 1, ranks: 4, save: "5e-1".into() });
        let text = String::from_utf8(manifest.encode().unwrap()).unwrap();
        assert!(text.contains(r#""part_of":{"rank":1,"ranks":4,"save":"5e-1"}"#), "{text}");
        assert_eq!(decode(&manifest).unwrap().part_of, manifest.part_of);
        assert_eq!(RankShare::noted_in(text.as_bytes()), manifest.part_of);
    }
}
