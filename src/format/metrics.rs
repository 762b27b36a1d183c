//! The metrics of a step: names and numbers that a manifest notes beside the step.

use super::lists;
use crate::error::Error;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

/// What a step's metrics are: names, such as `loss`, and numbers, NaN and infinities included.
pub type Metrics = BTreeMap<String, f64>;

/// Metrics of one checkpoint at most.
pub(crate) const METRICS_MAX: usize = 256;

/// Bytes of a metric's name at most.
pub(crate) const NAME_BYTES_MAX: usize = 256;

/// Adds metrics to others. A name that is there gets the new number.
///
/// # Errors
/// [`Error::Invalid`] if they then exceed the limits.
pub(crate) fn with<K: Into<String>>(
    mut all: Metrics,
    more: impl IntoIterator<Item = (K, f64)>,
) -> Result<Metrics, Error> {
    all.extend(more.into_iter().map(|(name, number)| (name.into(), number)));
    check(&all).map_err(Error::invalid)?;
    Ok(all)
}

/// Checks the limits that each reader relies on.
///
/// # Errors
/// What is wrong, as a sentence.
pub(crate) fn check(metrics: &Metrics) -> Result<(), String> {
    if metrics.len() > METRICS_MAX {
        return Err(format!(
            "{} metrics are more than {METRICS_MAX}: keep those that say which step to keep, and save the others \
             as values",
            metrics.len()
        ));
    }
    metrics.keys().try_for_each(|name| check_name(name))
}

fn check_name(name: &str) -> Result<(), String> {
    match name.len() {
        0 => Err("a metric has an empty name".into()),
        1..=NAME_BYTES_MAX => Ok(()),
        long => {
            let start: String = name.chars().take(20).collect();
            Err(format!(
                "the name of the metric {start:?}... has {long} bytes, more than {NAME_BYTES_MAX}"
            ))
        }
    }
}

/// Writes metrics as an object, in the order of their names.
///
/// # Errors
/// Those of `to`.
pub(crate) fn serialize<S: Serializer>(metrics: &Metrics, to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(metrics.iter().map(|(name, &number)| (name, Number(number))))
}

/// Reads what [`serialize`] writes.
///
/// # Errors
/// It is no such object, has a name twice, or exceeds the limits.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Metrics, D::Error> {
    let mut metrics = Metrics::new();
    let take = |name: Cow<'de, str>, Number(number)| {
        check_name(&name)?;
        if metrics.len() == METRICS_MAX {
            return Err(format!("there are more than {METRICS_MAX} metrics"));
        }
        let name = name.into_owned();
        match metrics.insert(name.clone(), number) {
            None => Ok(()),
            Some(_) => Err(format!("two metrics are named {name:?}")),
        }
    };
    lists::each_entry(from, "an object of metrics", take)?;
    Ok(metrics)
}

/// A number as [values](super::Value) write it: `{"$float": "nan"}` where JSON has none.
struct Number(f64);

const TAG: &str = "$float";

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let word = match self.0 {
            finite if finite.is_finite() => return to.serialize_f64(finite),
            nan if nan.is_nan() => "nan",
            infinite if infinite > 0.0 => "inf",
            _ => "-inf",
        };
        let mut map = to.serialize_map(Some(1))?;
        map.serialize_entry(TAG, word)?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a number, or {\"$float\": \"nan\"}, \"inf\" or \"-inf\"")
            }

            fn visit_f64<E>(self, number: f64) -> Result<Number, E> {
                Ok(Number(number))
            }

            // Somebody may have formatted the manifest with another program.
            fn visit_u64<E>(self, number: u64) -> Result<Number, E> {
                Ok(Number(number as f64))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Number, E> {
                Ok(Number(number as f64))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Number, A::Error> {
                let entry = from.next_entry::<lists::Text<'de>, lists::Text<'de>>()?;
                let number = match &entry {
                    Some((lists::Text(tag), lists::Text(word))) if tag == TAG => match &**word {
                        "nan" => Some(f64::NAN),
                        "inf" => Some(f64::INFINITY),
                        "-inf" => Some(f64::NEG_INFINITY),
                        _ => None,
                    },
                    _ => None,
                };
                let is_alone = from.next_key::<lists::Text<'de>>()?.is_none();
                number.filter(|_| is_alone).map(Number).ok_or_else(|| {
                    serde::de::Error::invalid_type(serde::de::Unexpected::Map, &self)
                })
            }
        }
        from.deserialize_any(Read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Serialize, serde::Deserialize)]
    struct Holder(#[serde(with = "super")] Metrics);

    fn read(text: &str) -> Result<Metrics, String> {
        serde_json::from_str(text).map(|Holder(metrics)| metrics).map_err(|e| e.to_string())
    }

    fn written(metrics: &Metrics) -> String {
        serde_json::to_string(&Holder(metrics.clone())).unwrap()
    }

    #[test]
    fn every_double_comes_back_as_it_was() {
        for number in [0.1, 3.0, -0.0, 1e300, 5e-324, f64::MAX, f64::INFINITY, f64::NEG_INFINITY] {
            let metrics = Metrics::from([("loss".into(), number)]);
            let text = written(&metrics);
            assert_eq!(read(&text).unwrap()["loss"].to_bits(), number.to_bits(), "{text}");
        }
        let text = written(&Metrics::from([("loss".into(), f64::NAN)]));
        assert_eq!(text, r#"{"loss":{"$float":"nan"}}"#);
        assert!(read(&text).unwrap()["loss"].is_nan());
    }

    #[test]
    fn only_an_object_of_numbers_is_read() {
        assert_eq!(
            read(r#"{"a": 1, "b": -2}"#).unwrap(),
            [("a".into(), 1.0), ("b".into(), -2.0)].into()
        );
        for (text, reason) in [
            ("[]", "an object of metrics"),
            (r#"{"a": "1"}"#, "a number"),
            (r#"{"a": true}"#, "a number"),
            (r#"{"a": null}"#, "a number"),
            (r#"{"a": [1]}"#, "a number"),
            (r#"{"a": {}}"#, "a number"),
            (r#"{"a": {"$float": "NaN"}}"#, "a number"),
            (r#"{"a": {"$float": "nan", "b": "c"}}"#, ""),
            (r#"{"a": {"b": "nan"}}"#, "a number"),
            (r#"{"a": 1e999}"#, "out of range"),
            (r#"{"a": 1.0, "a": 2.0}"#, "two metrics are named \"a\""),
            (r#"{"": 1.0}"#, "empty name"),
        ] {
            let refused = read(text).unwrap_err();
            assert!(refused.contains(reason), "{text}: {refused}");
        }
    }

    #[test]
    fn what_is_written_within_the_limits_is_read_and_nothing_beyond() {
        let of = |count: usize, bytes: usize| -> Metrics {
            (0..count).map(|i| (format!("{i:0bytes$}"), 0.5)).collect()
        };
        let most = of(METRICS_MAX, NAME_BYTES_MAX);
        assert_eq!((check(&most), read(&written(&most)).unwrap()), (Ok(()), most));
        for (metrics, reason) in
            [(of(METRICS_MAX + 1, 3), "257 metrics"), (of(1, NAME_BYTES_MAX + 1), "257 bytes")]
        {
            assert!(check(&metrics).unwrap_err().contains(reason));
            read(&written(&metrics)).unwrap_err();
        }
    }
}
