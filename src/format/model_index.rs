//! The index of a model with several files: which tensor is in which file. No I/O.

use super::lists::{Text, each_entry, push};
use super::names;
use serde::de::{Deserialize, Deserializer, Error as _};
use std::borrow::Cow;

/// The files of a model's tensors.
#[derive(Debug)]
pub struct ModelIndex<'a> {
    /// Name and file of each tensor, sorted.
    tensors: Vec<(Cow<'a, str>, Cow<'a, str>)>,
}

impl<'a> ModelIndex<'a> {
    /// Reads an index.
    ///
    /// # Errors
    /// It is not such JSON, names a tensor twice, or a file that is not in its directory.
    pub fn read(text: &'a [u8]) -> serde_json::Result<Self> {
        #[derive(serde::Deserialize)]
        struct Index<'a> {
            #[serde(borrow)]
            weight_map: WeightMap<'a>,
        }
        let Index { weight_map: WeightMap(mut tensors) } = serde_json::from_slice(text)?;
        tensors.sort_unstable();
        match tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => {
                Err(serde_json::Error::custom(format_args!("lists {:?} twice", pair[0].0)))
            }
            None => Ok(Self { tensors }),
        }
    }

    /// The tensors, sorted by name, and the file of each.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tensors.iter().map(|(name, file)| (name.as_ref(), file.as_ref()))
    }

    /// The file of a tensor.
    pub fn file_of(&self, tensor: &str) -> Option<&str> {
        let found = self.tensors.binary_search_by(|(name, _)| name.as_ref().cmp(tensor)).ok()?;
        Some(&self.tensors[found].1)
    }
}

/// The index's main field.
struct WeightMap<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'de: 'a, 'a> Deserialize<'de> for WeightMap<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut list = Vec::new();
        each_entry(from, "an object of files", |tensor, Text(file)| {
            if !names::is_plain(&file) {
                return Err(format!("{file:?} is not a file in its directory"));
            }
            push(&mut list, (tensor, file));
            Ok(())
        })?;
        Ok(Self(list))
    }
}
