//! Reads the lists of manifests, receipts and headers in memory that their text bounds: whatever a file says, opening
//! it takes at most four times its size and 1 MiB. No I/O.
//!
//! Three things would break that bound: an entry that is a JSON list instead of an object, since `["",0,""]` is shorter
//! than the entry that it makes; a list that doubles its capacity when it is full; and long lists of dimensions,
//! where `0,` becomes eight bytes.

use super::Shape;
use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use smallvec::{Array, SmallVec};
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

/// Shapes and offsets of up to this many dimensions take less memory than the rest of their entry has text.
const DIMS_USUAL: usize = 8;

/// Dimensions beyond [`DIMS_USUAL`] that all shapes and offsets in a file may have together.
pub(crate) const LONG_DIMS_MAX: usize = 1 << 15;

/// Counts the dimensions that the shapes and offsets in a file have beyond [`DIMS_USUAL`] each.
#[derive(Debug, Default)]
pub(crate) struct LongDims(usize);

impl LongDims {
    /// Counts a shape or a list of offsets of this many dimensions.
    ///
    /// # Errors
    /// There are more than [`LONG_DIMS_MAX`] now, as a sentence.
    pub fn add(&mut self, dims: usize) -> Result<(), String> {
        self.0 += dims.saturating_sub(DIMS_USUAL);
        match self.0 <= LONG_DIMS_MAX {
            true => Ok(()),
            false => Err(format!(
                "shapes and offsets have more than {LONG_DIMS_MAX} dimensions in all, beyond {DIMS_USUAL} each"
            )),
        }
    }
}

/// An entry of a list.
pub(super) trait Entry {
    /// Counts its shapes and offsets.
    ///
    /// # Errors
    /// As [`LongDims::add`].
    fn count_dims(&self, long: &mut LongDims) -> Result<(), String>;
}

/// A list that grows by an eighth, not by doubling.
trait List<T>: Default {
    fn push(&mut self, item: T);
}

/// Capacity to add to a full list of this length.
fn step(len: usize) -> usize {
    (len / 8).max(2)
}

impl<T> List<T> for Vec<T> {
    fn push(&mut self, item: T) {
        if self.len() == self.capacity() {
            self.reserve_exact(step(self.len()));
        }
        self.push(item);
    }
}

impl<A: Array> List<A::Item> for SmallVec<A> {
    fn push(&mut self, item: A::Item) {
        if self.len() == self.capacity() {
            self.reserve_exact(step(self.len()));
        }
        self.push(item);
    }
}

/// Appends to a list, which grows by an eighth when it is full.
pub(super) fn push<T>(list: &mut Vec<T>, item: T) {
    List::push(list, item);
}

/// Reads a list of entries. Fails at the entry that has too many dimensions.
#[expect(private_bounds, reason = "Vec and SmallVec")]
pub(super) fn entries<'de, D, T, L>(from: D) -> Result<L, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Entry,
    L: List<T>,
{
    struct Read<T, L>(PhantomData<(T, L)>);
    impl<'de, T: Deserialize<'de> + Entry, L: List<T>> Visitor<'de> for Read<T, L> {
        type Value = L;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a list of objects")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<L, A::Error> {
            let (mut list, mut long) = (L::default(), LongDims::default());
            while let Some(Struct(item)) = from.next_element::<Struct<T>>()? {
                item.count_dims(&mut long).map_err(A::Error::custom)?;
                list.push(item);
            }
            Ok(list)
        }
    }
    from.deserialize_seq(Read(PhantomData))
}

/// Reads an object, `what`, and gives each of its entries to `take`, which says what is wrong with one.
pub(super) fn each_entry<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
    what: &'static str,
    take: impl FnMut(Cow<'de, str>, T) -> Result<(), String>,
) -> Result<(), D::Error> {
    struct Read<T, F>(&'static str, F, PhantomData<T>);
    impl<'de, T, F> Visitor<'de> for Read<T, F>
    where
        T: Deserialize<'de>,
        F: FnMut(Cow<'de, str>, T) -> Result<(), String>,
    {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_map<A: MapAccess<'de>>(mut self, mut from: A) -> Result<(), A::Error> {
            while let Some((Text(key), value)) = from.next_entry()? {
                (self.1)(key, value).map_err(A::Error::custom)?;
            }
            Ok(())
        }
    }
    from.deserialize_map(Read(what, take, PhantomData))
}

/// Reads a list of at most `MAX` texts.
pub(super) fn few<'de, D: Deserializer<'de>, const MAX: usize>(
    from: D,
) -> Result<Vec<String>, D::Error> {
    struct Read(usize);
    impl<'de> Visitor<'de> for Read {
        type Value = Vec<String>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "a list of at most {} texts", self.0)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Vec<String>, A::Error> {
            let mut list = Vec::new();
            while let Some(text) = from.next_element()? {
                if list.len() == self.0 {
                    return Err(A::Error::invalid_length(list.len() + 1, &self));
                }
                list.push(text);
            }
            Ok(list)
        }
    }
    from.deserialize_seq(Read(MAX))
}

/// Reads a list of numbers to the end of another list.
pub(super) struct Append<'a, A: Array<Item = u64>>(pub &'a mut SmallVec<A>);

impl<'de, A: Array<Item = u64>> DeserializeSeed<'de> for Append<'_, A> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de, A: Array<Item = u64>> Visitor<'de> for Append<'_, A> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of numbers")
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut from: S) -> Result<(), S::Error> {
        let mut dims = 0;
        while let Some(dim) = from.next_element()? {
            List::push(self.0, dim);
            dims += 1;
            LongDims::default().add(dims).map_err(S::Error::custom)?;
        }
        Ok(())
    }
}

/// Reads a shape, into an allocation of exactly its length.
pub(super) fn shape<'de, D: Deserializer<'de>>(from: D) -> Result<Shape, D::Error> {
    let mut dims = SmallVec::<[u64; 16]>::new();
    Append(&mut dims).deserialize(from)?;
    Ok(Shape::from_slice(&dims))
}

/// Text, borrowed if it has no escapes.
#[derive(serde::Deserialize)]
#[serde(transparent)]
pub(super) struct Text<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// A struct that is read from an object alone: serde would take a list of its fields too.
pub(super) struct Struct<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Struct<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        T::deserialize(Object(from)).map(Self)
    }
}

/// Reads every type from a JSON object.
struct Object<D>(D);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Object<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_map(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}
