//! Paths in the JSON of reports, for `#[serde(with = ...)]`. JSON is Unicode, and a path need not be: each byte that is
//! not UTF-8 becomes U+0000, which no path contains, and two hex digits. So no path fails, and none is changed.

use serde::{Deserialize, Deserializer, Serializer};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Writes a path.
///
/// # Errors
/// Those of `to`.
pub(crate) fn serialize<P, S>(path: &P, to: S) -> Result<S::Ok, S::Error>
where
    P: AsRef<Path> + ?Sized,
    S: Serializer,
{
    to.serialize_str(&encode(path.as_ref().as_os_str()))
}

/// Reads what [`serialize`] wrote.
///
/// # Errors
/// Those of `from`.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    String::deserialize(from).map(|text| decode(&text).into())
}

/// The same for a list.
pub(crate) mod list {
    use super::{Path, Serializer, encode};

    /// Writes the paths.
    ///
    /// # Errors
    /// Those of `to`.
    pub(crate) fn serialize<P, S>(paths: &[P], to: S) -> Result<S::Ok, S::Error>
    where
        P: AsRef<Path>,
        S: Serializer,
    {
        to.collect_seq(paths.iter().map(|path| encode(path.as_ref().as_os_str())))
    }
}

fn encode(path: &OsStr) -> String {
    let mut text = String::with_capacity(path.len());
    for run in path.as_bytes().utf8_chunks() {
        text.push_str(run.valid());
        text.extend(run.invalid().iter().map(|byte| format!("\0{byte:02x}")));
    }
    text
}

fn decode(text: &str) -> OsString {
    let mut runs = text.split('\0');
    let mut bytes = runs.next().unwrap_or_default().as_bytes().to_vec();
    for run in runs {
        let byte = run.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        // Text that `encode` does not write keeps its U+0000; the system refuses such a path.
        bytes.push(byte.unwrap_or(0));
        bytes.extend_from_slice(byte.map_or(run, |_| &run[2..]).as_bytes());
    }
    OsString::from_vec(bytes)
}

/// Converts a report's JSON for Python, where such a byte is a lone surrogate as in `os.fsdecode`: `\u0000ff` becomes
/// `\udcff`.
pub fn for_python(json: &str) -> String {
    const MARK: &str = "u0000";
    let mut text = String::with_capacity(json.len());
    let mut rest = json;
    // Backslashes come in pairs, each with what it escapes.
    while let Some((before, escape)) = rest.split_once('\\') {
        text.push_str(before);
        text.push('\\');
        let digits = escape.strip_prefix(MARK).and_then(|after| after.get(..2));
        if digits.is_some_and(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit())) {
            text.push_str("udc");
            rest = &escape[MARK.len()..];
        } else {
            let escaped = escape.chars().next().map_or(0, char::len_utf8);
            text.push_str(&escape[..escaped]);
            rest = &escape[escaped..];
        }
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Serialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Report(#[serde(with = "super")] PathBuf);

    fn json(path: &[u8]) -> String {
        serde_json::to_string(&Report(OsStr::from_bytes(path).into())).unwrap()
    }

    #[test]
    fn only_bytes_that_are_not_utf_8_become_hex() {
        assert_eq!(json("größe/step-1".as_bytes()), "\"größe/step-1\"");
        assert_eq!(json(b"sm/\xff\xc3/step-1"), r#""sm/\u0000ff\u0000c3/step-1""#);
    }

    #[test]
    fn for_python_uses_the_surrogates_of_os_fsdecode() {
        assert_eq!(for_python(&json(b"sm/\xff\xc3/x")), r#""sm/\udcff\udcc3/x""#);
        // A path with backslashes is unchanged.
        assert_eq!(for_python(&json(br"a\u0000ff\")), json(br"a\u0000ff\"));
        assert_eq!(for_python(&json(b"\\\xff\"\n")), r#""\\\udcff\"\n""#);
    }

    proptest! {
        #[test]
        fn every_path_round_trips(bytes in proptest::collection::vec(1u8.., 0..40)) {
            let back: Report = serde_json::from_str(&json(&bytes)).unwrap();
            prop_assert_eq!(back.0.as_os_str().as_bytes(), &bytes[..]);
        }
    }
}
