//! A manifest's entry of a tensor chunk: a region of a tensor, and where its bytes are.

use crate::format::cover::Extent;
use crate::format::lists::{self, Entry, LongDims};
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use smallvec::SmallVec;
use std::fmt;

/// A region of a tensor, dense in row-major order in one file.
///
/// A manifest of a large training has millions of them. One of up to two dimensions takes 56 bytes, and no allocation.
#[derive(Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Index in [`Manifest::files`](super::Manifest::files).
    pub file: u32,
    /// Whether it is a region; otherwise it is the whole tensor.
    is_region: bool,
    /// Offset of its first byte in that file.
    pub begin: u64,
    /// The region's offsets, then its sizes.
    dims: Dims,
}

/// Offsets, then sizes, which are read without a list in between.
type Dims = SmallVec<[u64; 4]>;

/// Names of a chunk's numbers in JSON.
#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum Field {
    File,
    Begin,
    Offsets,
    Sizes,
}

impl<'de> Deserialize<'de> for Chunk {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Chunk;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a tensor chunk")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Chunk, A::Error> {
                let (mut file, mut begin, mut offsets, mut sizes) = (None, None, None, None);
                let mut dims = Dims::new();
                while let Some(field) = from.next_key()? {
                    let at = dims.len();
                    let (name, is_first) = match field {
                        Field::File => ("file", file.replace(from.next_value()?).is_none()),
                        Field::Begin => ("begin", begin.replace(from.next_value()?).is_none()),
                        Field::Offsets => {
                            from.next_value_seed(lists::Append(&mut dims))?;
                            ("offsets", offsets.replace(at..dims.len()).is_none())
                        }
                        Field::Sizes => {
                            from.next_value_seed(lists::Append(&mut dims))?;
                            ("sizes", sizes.replace(at..dims.len()).is_none())
                        }
                    };
                    if !is_first {
                        return Err(A::Error::duplicate_field(name));
                    }
                }
                let file = file.ok_or_else(|| A::Error::missing_field("file"))?;
                let begin = begin.ok_or_else(|| A::Error::missing_field("begin"))?;
                match (offsets, sizes) {
                    (None, None) => Ok(Chunk::whole(file, begin)),
                    (Some(offsets), Some(sizes)) if offsets.len() == sizes.len() => {
                        dims.rotate_left(offsets.start); // 0, unless the sizes came first
                        Ok(Chunk { file, is_region: true, begin, dims })
                    }
                    _ => Err(A::Error::custom("a chunk's offsets and sizes differ in number")),
                }
            }
        }
        from.deserialize_map(Read)
    }
}

impl Serialize for Chunk {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Text<'a> {
            file: u32,
            begin: u64,
            #[serde(skip_serializing_if = "Option::is_none")]
            offsets: Option<&'a [u64]>,
            #[serde(skip_serializing_if = "Option::is_none")]
            sizes: Option<&'a [u64]>,
        }
        let (file, begin, offsets, sizes) = (self.file, self.begin, self.offsets(), self.sizes());
        Text { file, begin, offsets, sizes }.serialize(to)
    }
}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {} of file {}", self.extent(), self.begin, self.file)
    }
}

impl Entry for Chunk {
    fn count_dims(&self, long: &mut LongDims) -> Result<(), String> {
        [self.offsets(), self.sizes()]
            .into_iter()
            .flatten()
            .try_for_each(|dims| long.add(dims.len()))
    }
}

impl Chunk {
    /// A whole tensor.
    pub fn whole(file: u32, begin: u64) -> Self {
        Self { file, begin, is_region: false, dims: SmallVec::new() }
    }

    /// A region: its offsets and its sizes, one number per dimension.
    ///
    /// # Panics
    /// They differ in number.
    pub fn region(file: u32, begin: u64, (offsets, sizes): (&[u64], &[u64])) -> Self {
        assert_eq!(offsets.len(), sizes.len(), "a number per dimension");
        let mut dims = SmallVec::with_capacity(2 * offsets.len());
        dims.extend_from_slice(offsets);
        dims.extend_from_slice(sizes);
        Self { file, begin, is_region: true, dims }
    }

    /// A region of so many dimensions, whose offsets and sizes `next` returns one by one.
    pub(in crate::format) fn read<E>(
        (file, begin): (u32, u64),
        dims: usize,
        mut next: impl FnMut() -> Result<u64, E>,
    ) -> Result<Self, E> {
        let mut both = Dims::new();
        for _ in 0..2 * dims {
            both.push(next()?);
        }
        Ok(Self { file, is_region: true, begin, dims: both })
    }

    /// Where in the tensor it starts, one number per dimension; `None` if it is the whole tensor.
    pub fn offsets(&self) -> Option<&[u64]> {
        self.extent().map(|(offsets, _)| offsets)
    }

    /// Its size, one number per dimension; `None` if it is the whole tensor.
    pub fn sizes(&self) -> Option<&[u64]> {
        self.extent().map(|(_, sizes)| sizes)
    }

    /// Offsets and sizes; `None` if it is the whole tensor.
    pub fn extent(&self) -> Option<Extent<'_>> {
        self.is_region.then(|| self.dims.split_at(self.dims.len() / 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Chunk, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn fields_in_any_order_make_one_chunk() {
        let chunk = Chunk::region(3, 4096, (&[1, 2, 3], &[4, 5, 6]));
        let text = r#"{"file":3,"begin":4096,"offsets":[1,2,3],"sizes":[4,5,6]}"#;
        assert_eq!(serde_json::to_string(&chunk).unwrap(), text);
        assert_eq!(read(text), Ok(chunk.clone()));
        let turned = r#"{"sizes":[4,5,6],"begin":4096,"offsets":[1,2,3],"file":3}"#;
        assert_eq!(read(turned), Ok(chunk));
        let whole = r#"{"file":0,"begin":1}"#;
        assert_eq!(serde_json::to_string(&Chunk::whole(0, 1)).unwrap(), whole);
        assert_eq!(read(whole), Ok(Chunk::whole(0, 1)));
        let scalar = Chunk::region(0, 1, (&[], &[]));
        assert_eq!(read(&serde_json::to_string(&scalar).unwrap()), Ok(scalar));
    }

    #[test]
    fn fields_that_are_missing_unknown_or_unlike_are_refused() {
        for (text, why) in [
            (r#"{"begin":1}"#, "missing field `file`"),
            (r#"{"file":1}"#, "missing field `begin`"),
            (r#"{"file":0,"begin":1,"begin":1}"#, "duplicate field `begin`"),
            (r#"{"file":0,"begin":1,"end":1}"#, "unknown field `end`"),
            (r#"{"file":0,"begin":1,"sizes":[1]}"#, "differ in number"),
            (r#"{"file":0,"begin":1,"sizes":[1],"offsets":[]}"#, "differ in number"),
            (r#"{"file":0,"begin":1,"sizes":[1],"offsets":[0],"sizes":[1]}"#, "duplicate field"),
            (r#"{"file":4294967296,"begin":1}"#, "invalid value"),
            (r#"{"file":0,"begin":-1}"#, "invalid value"),
            (r#"[0,1]"#, "a tensor chunk"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn chunk_of_two_dimensions_takes_56_bytes_and_no_allocation() {
        assert_eq!(std::mem::size_of::<Chunk>(), 56);
        let made = allocation_counter::measure(|| {
            std::hint::black_box(Chunk::region(0, 0, (&[1, 2], &[3, 4])));
        });
        assert_eq!(made.count_total, 0);
    }
}
