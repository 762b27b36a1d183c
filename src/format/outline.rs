//! What ranks compare of the trees of their states, before they save them as one.

use crate::error::{Error, Result};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

/// A tree of values in short. Equal on two hosts that run the same build.
#[derive(Debug, PartialEq, Eq)]
pub struct Outline {
    /// A hash of the containers, the keys and the tensors' names.
    pub structure: u64,
    /// A hash of all other values, in their order.
    pub values: u64,
    /// The names of the tensors, arrays and objects that it refers to, each time it does.
    pub names: Vec<String>,
}

impl Outline {
    /// The outline of a tree, which is JSON.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is not.
    pub fn of(tree: &str) -> Result<Self> {
        let mut found = Found::default();
        let mut json = serde_json::Deserializer::from_str(tree);
        json.disable_recursion_limit();
        Node(&mut found, Role::Value)
            .deserialize(&mut json)
            .and_then(|()| json.end())
            .map_err(|e| Error::invalid(format!("the state's tree is no JSON: {e}")))?;
        let Found { structure, values, names } = found;
        Ok(Self { structure: structure.finish(), values: values.finish(), names })
    }
}

#[derive(Default)]
struct Found {
    structure: DefaultHasher,
    values: DefaultHasher,
    names: Vec<String>,
}

/// What a part of the tree is.
#[derive(Clone, Copy, PartialEq)]
enum Role {
    Value,
    /// A tensor's name.
    Name,
    /// The pairs of a dictionary whose keys are not text.
    Pairs,
    /// One of these pairs.
    Pair,
    /// A key, or a part of one.
    Key,
}

struct Node<'a>(&'a mut Found, Role);

impl Node<'_> {
    fn scalar(self, value: impl Hash) {
        match self.1 {
            Role::Name | Role::Key => value.hash(&mut self.0.structure),
            Role::Value | Role::Pairs | Role::Pair => value.hash(&mut self.0.values),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> std::result::Result<(), E> {
        self.scalar(());
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<(), E> {
        self.scalar(value);
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<(), E> {
        self.scalar(value);
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<(), E> {
        self.scalar(value);
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> std::result::Result<(), E> {
        self.scalar(value.to_bits());
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<(), E> {
        if self.1 == Role::Name {
            self.0.names.push(value.to_owned());
        }
        self.scalar(value);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<(), A::Error> {
        let Self(found, role) = self;
        '['.hash(&mut found.structure);
        let mut is_first = true;
        loop {
            let of_item = match role {
                Role::Pairs => Role::Pair,
                Role::Pair if is_first => Role::Key,
                Role::Pair => Role::Value,
                role => role,
            };
            if items.next_element_seed(Node(found, of_item))?.is_none() {
                break;
            }
            is_first = false;
        }
        ']'.hash(&mut found.structure);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> std::result::Result<(), A::Error> {
        let Self(found, role) = self;
        '{'.hash(&mut found.structure);
        while let Some(key) = entries.next_key::<Cow<'de, str>>()? {
            key.hash(&mut found.structure);
            let of_entry = match &*key {
                "$tensor" | "$ndarray" | "$object" => Role::Name,
                "$dict" if role != Role::Key => Role::Pairs,
                _ if role == Role::Key => Role::Key,
                _ => Role::Value,
            };
            entries.next_value_seed(Node(found, of_entry))?;
        }
        '}'.hash(&mut found.structure);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tree: &str) -> Outline {
        Outline::of(tree).unwrap()
    }

    #[test]
    fn values_may_differ_where_the_structure_does_not() {
        let one = of(r#"{"a":{"$tensor":"a"},"step":1,"losses":[0.5],"done":false}"#);
        let other = of(r#"{"a":{"$tensor":"a"},"step":2,"losses":[0.5,0.25],"done":true}"#);
        assert_eq!(one.structure, other.structure);
        assert_ne!(one.values, other.values);
        assert_eq!(one.names, ["a"]);
    }

    #[test]
    fn keys_and_tensors_are_structure() {
        let one = of(r#"{"a":1}"#);
        for other in [
            r#"{"b":1}"#,
            r#"{"a":1,"b":2}"#,
            r#"{"a":[1]}"#,
            r#"{"a":{"$tensor":"a"}}"#,
            r#"{"a":{"x":1}}"#,
        ] {
            assert_ne!(one.structure, of(other).structure, "{other}");
        }
        let tensor = |name: &str| of(&format!(r#"{{"a":{{"$tensor":"{name}"}}}}"#)).structure;
        assert_ne!(tensor("a"), tensor("b"));
        let keyed = |key: &str| of(&format!(r#"{{"$dict":[[{key},1]]}}"#)).structure;
        assert_ne!(keyed("0"), keyed("1"));
        assert_ne!(keyed(r#"{"$tuple":[0,1]}"#), keyed(r#"{"$tuple":[0,2]}"#));
    }

    #[test]
    fn text_that_is_no_json_is_refused() {
        assert!(Outline::of("{").is_err());
        assert!(Outline::of("{} {}").is_err());
    }
}
