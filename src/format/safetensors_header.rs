//! Reads the header of a safetensors file that another program wrote. The crate safetensors reads headers too, but takes
//! ten times a header's length in memory. No I/O.

use super::lists::{LongDims, Struct, Text, each_entry, push, shape};
use super::manifest::{Chunk, TensorEntry};
use super::{Dtype, Shape};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use smallvec::smallvec;
use std::borrow::Cow;
use std::fmt;

/// The key of the file's own strings among its tensors.
const STRINGS: &str = "__metadata__";
/// The string that says which regions of their tensors the file holds.
const SHARDING: &str = "DCP_SHARDING_INFO";
/// The string that ringstow's own shards have.
const OWN: &str = "ringstow";

/// What a header says.
#[derive(Debug)]
pub struct Header {
    /// The tensors in the order of their bytes, which adjoin each other. Each has one chunk, in file number 0, that
    /// begins where it does in the data section.
    pub tensors: Vec<TensorEntry>,
    /// Bytes of the data section.
    pub data_bytes: u64,
    /// Whether ringstow wrote the file.
    pub is_own: bool,
    /// Which regions of their tensors the file holds; see [`Sharding::read`].
    pub sharding: Option<String>,
}

impl Header {
    /// Reads a header's JSON.
    ///
    /// # Errors
    /// What is wrong with it, as a sentence.
    pub fn read(text: &[u8]) -> Result<Self, String> {
        let mut header: Self = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        header.tensors.shrink_to_fit();
        header.tensors.sort_unstable_by(|a, b| (range(a), &a.name).cmp(&(range(b), &b.name)));
        for tensor in &header.tensors {
            let (begin, end) = range(tensor);
            if begin != header.data_bytes {
                return Err(format!(
                    "the bytes of tensor {:?} begin at {begin} of the data, those before it end at {}",
                    tensor.name, header.data_bytes
                ));
            }
            header.data_bytes = end;
        }
        Ok(header)
    }
}

/// Where a tensor's bytes are in the data section. An entry that was read has only sizes that fit.
fn range(tensor: &TensorEntry) -> (u64, u64) {
    let begin = tensor.chunks.first().map_or(0, |chunk| chunk.begin);
    (begin, begin.saturating_add(tensor.nbytes()))
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Header, A::Error> {
                let (mut tensors, mut long) = (Vec::new(), LongDims::default());
                let mut strings = None::<Option<Strings>>;
                while let Some(Text(name)) = from.next_key()? {
                    if name == STRINGS {
                        // The crate safetensors refuses it, too; other readers keep the first or the last.
                        if strings.replace(from.next_value()?).is_some() {
                            return Err(A::Error::custom(format_args!("{STRINGS} is given twice")));
                        }
                        continue;
                    }
                    let Struct::<Stored>(found) = from.next_value()?;
                    long.add(found.shape.len()).map_err(A::Error::custom)?;
                    let tensor = found
                        .entry(&name)
                        .map_err(|why| A::Error::custom(format_args!("tensor {name:?} {why}")))?;
                    push(&mut tensors, tensor);
                }
                let Strings { is_own, sharding } = strings.flatten().unwrap_or_default();
                Ok(Header { tensors, data_bytes: 0, is_own, sharding })
            }
        }
        from.deserialize_map(Read)
    }
}

/// A tensor as a header describes it.
#[derive(serde::Deserialize)]
struct Stored<'a> {
    #[serde(borrow)]
    dtype: Text<'a>,
    #[serde(deserialize_with = "shape")]
    shape: Shape,
    data_offsets: (u64, u64),
}

impl Stored<'_> {
    fn entry(self, name: &str) -> Result<TensorEntry, String> {
        let Self { dtype: Text(dtype), shape, data_offsets: (begin, end) } = self;
        let known = Dtype::from_name(&dtype).filter(|dtype| dtype.safetensors().is_some());
        let dtype = known.ok_or_else(|| format!("is of unknown type {dtype}"))?;
        let nbytes = dtype.nbytes(&shape);
        if nbytes.is_none() || nbytes != end.checked_sub(begin) {
            return Err(format!("of {dtype} {shape:?} cannot be the bytes from {begin} to {end}"));
        }
        let chunks = smallvec![Chunk::whole(0, begin)];
        Ok(TensorEntry { name: name.into(), dtype, shape, chunks, object: false })
    }
}

/// The file's own strings.
#[derive(Default)]
struct Strings {
    is_own: bool,
    sharding: Option<String>,
}

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut strings = Self::default();
        each_entry(from, "an object of texts", |key, Text(text)| {
            strings.is_own |= key == OWN;
            if key == SHARDING {
                strings.sharding = Some(text.into_owned());
            }
            Ok(())
        })?;
        Ok(strings)
    }
}

/// Where the regions in a file begin in their tensors.
#[derive(Debug, Default)]
pub struct Sharding<'a>(Vec<(Cow<'a, str>, Shape)>);

impl<'a> Sharding<'a> {
    /// Reads a file's `DCP_SHARDING_INFO`.
    ///
    /// # Errors
    /// It is not JSON of the known form.
    pub fn read(text: &'a str) -> serde_json::Result<Self> {
        let mut sharding: Self = serde_json::from_str(text)?;
        sharding.0.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(sharding)
    }

    /// Where the region of this tensor begins; `None` if the file holds all of it.
    pub fn offsets(&self, name: &str) -> Option<&[u64]> {
        let found = self.0.binary_search_by(|(known, _)| known.as_ref().cmp(name)).ok()?;
        Some(&self.0[found].1)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Sharding<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let (mut list, mut long) = (Vec::new(), LongDims::default());
        each_entry(from, "an object of offsets", |name, Struct(Saved { saved_offsets })| {
            long.add(saved_offsets.len())?;
            push(&mut list, (name, saved_offsets));
            Ok(())
        })?;
        Ok(Self(list))
    }
}

#[derive(serde::Deserialize)]
struct Saved {
    #[serde(deserialize_with = "shape")]
    saved_offsets: Shape,
}
