//! The environment variables of ringstow: which fields they set, how a value is written, and which are unknown.

use super::Config;
use crate::error::{Error, Result};
use crate::sys::environment;
use std::ffi::OsString;
use strsim::levenshtein;
use toml::Value;

/// Prefix of ringstow's variables.
const PREFIX: &str = "RINGSTOW_";
/// Names a file to read instead of `ringstow.toml` in the current directory.
pub(super) const FILE_VARIABLE: &str = "RINGSTOW_CONFIG";
/// Turns progress bars off. Not a field: it says nothing about how bytes move.
const PROGRESS_VARIABLE: &str = "RINGSTOW_PROGRESS";
/// Variables for ringstow's own tests and benches.
const OTHERS: &[&str] = &[
    "RINGSTOW_CUTS",
    "RINGSTOW_EACH_CALL",
    "RINGSTOW_FAULT_SEEDS",
    "RINGSTOW_FLIPS",
    "RINGSTOW_FUZZ",
    "RINGSTOW_INTERLEAVINGS",
    "RINGSTOW_KILLS",
    "RINGSTOW_MINUTES",
    "RINGSTOW_MUTATIONS",
    "RINGSTOW_PASSES",
    "RINGSTOW_REAL_GPU",
    "RINGSTOW_REQUIRE_RIGS",
    "RINGSTOW_RESTARTS",
    "RINGSTOW_ROUNDS",
    "RINGSTOW_SEED",
    "RINGSTOW_SEEDS",
    "RINGSTOW_STATES",
];
const OTHERS_BEGIN: &[&str] = &["RINGSTOW_BENCH_", "RINGSTOW_FAKE_CUDA", "RINGSTOW_TEST_"];

/// Each field, in order, with its default, which shows the type of its values.
pub(super) fn fields() -> serde_json::Map<String, serde_json::Value> {
    match serde_json::to_value(Config::default()) {
        Ok(serde_json::Value::Object(fields)) => fields,
        other => unreachable!("a struct is an object: {other:?}"),
    }
}

/// A warning for each unknown variable that begins with the prefix, sorted.
pub(super) fn unknown(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut known: Vec<String> = fields().keys().map(|field| variable_of(field)).collect();
    known.extend([FILE_VARIABLE.into(), PROGRESS_VARIABLE.into()]);
    let is_other = |name: &str| {
        OTHERS.contains(&name) || OTHERS_BEGIN.iter().any(|begin| name.starts_with(begin))
    };
    let mut unknown: Vec<String> = names
        .filter(|name| name.starts_with(PREFIX) && !known.contains(name) && !is_other(name))
        .collect();
    unknown.sort();
    let warning = |name: &String| {
        let hint = match nearest(name, &known) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("there are {}", known.join(", ")),
        };
        format!("{name} in the environment is not a setting of ringstow, and is ignored: {hint}")
    };
    unknown.iter().map(warning).collect()
}

/// The known name with the smallest edit distance, if less than half of the name after the prefix differs.
fn nearest<'k>(name: &str, known: &'k [String]) -> Option<&'k String> {
    let letters = |name: &str| name.len() - PREFIX.len();
    let (near, away) = known
        .iter()
        .map(|known| (known, levenshtein(name, known)))
        .min_by_key(|(_, away)| *away)?;
    (2 * away < letters(name).min(letters(near))).then_some(near)
}

/// Whether the environment allows progress bars: unless `RINGSTOW_PROGRESS` is `0`, `off`, `no` or `false`.
pub fn shows_progress() -> bool {
    let off = environment::var_os(PROGRESS_VARIABLE).is_some_and(|text| {
        let text = text.to_string_lossy();
        matches!(value(&text, &serde_json::Value::Bool(true)), Ok(Value::Boolean(false)))
    });
    !off
}

/// The variable of a field.
pub(super) fn variable_of(field: &str) -> String {
    format!("{PREFIX}{}", field.to_uppercase())
}

/// The value of a variable. Refuses one that is not UTF-8: ignoring it could make a save go elsewhere.
pub(super) fn said_by(name: &str, value: Option<OsString>) -> Result<Option<String>> {
    let value = value.filter(|value| !value.is_empty()).map(OsString::into_string).transpose();
    value.map_err(|value| {
        Error::invalid(format!("the environment says {name}={}: it must be UTF-8", value.display()))
    })
}

/// Parses a variable as a value of the type of the field's default. A word (`on`, `uring`) may have any case.
pub(super) fn value(
    text: &str,
    default: &serde_json::Value,
) -> std::result::Result<Value, &'static str> {
    use serde_json::Value as Json;
    Ok(match default {
        Json::Bool(_) => Value::Boolean(match text.to_ascii_lowercase().as_str() {
            "true" | "on" | "yes" | "1" => true,
            "false" | "off" | "no" | "0" => false,
            _ => return Err("it must be true, on, yes or 1, or false, off, no or 0"),
        }),
        Json::Array(_) => paths(text),
        // Sizes have units.
        Json::Number(_) => text.parse().map_or_else(|_| Value::String(text.into()), Value::Integer),
        Json::String(_) => Value::String(text.to_ascii_lowercase()),
        _ => Value::String(text.into()),
    })
}

/// Several paths, as in `PATH`: separated by colons, which are also in URLs.
fn paths(text: &str) -> Value {
    let parts: Vec<&str> = text.split(':').collect();
    let mut paths: Vec<String> = Vec::new();
    for (at, part) in parts.iter().enumerate() {
        let is_scheme = parts.get(at + 1).is_some_and(|next| next.starts_with("//"));
        let begins_another = part.is_empty() || part.starts_with('/') || is_scheme;
        match paths.last_mut() {
            Some(last) if part.starts_with("//") && !last.is_empty() && !last.contains('/') => {
                *last = format!("{last}:{part}");
            }
            // A port, or a secret, for which the URL is refused.
            Some(last) if is_host(last) && !begins_another => *last = format!("{last}:{part}"),
            _ => paths.push((*part).into()),
        }
    }
    paths.retain(|path| !path.is_empty());
    Value::Array(paths.into_iter().map(Value::String).collect())
}

/// Whether it is a URL that has no path yet.
fn is_host(text: &str) -> bool {
    text.split_once("://").is_some_and(|(_, rest)| !rest.contains('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_variable_warning_suggests_the_nearest() {
        let said = |names: &[&str]| unknown(names.iter().map(|name| (*name).to_owned()));
        for (misspelt, meant) in [
            ("RINGSTOW_POOL_BYTE", "RINGSTOW_POOL_BYTES?"),
            ("RINGSTOW_QUEUEDEPTH", "RINGSTOW_QUEUE_DEPTH?"),
            ("RINGSTOW_STRIPES", "RINGSTOW_STRIPE?"),
            ("RINGSTOW_CONFG", "RINGSTOW_CONFIG?"),
            ("RINGSTOW_SPEED", "there are RINGSTOW_POOL_BYTES, RINGSTOW_BLOCK_BYTES"),
            ("RINGSTOW_", "there are"),
        ] {
            let warnings = said(&["HOME", misspelt, "RINGSTOW_ENGINE"]);
            let [warning] = &warnings[..] else { panic!("{warnings:?}") };
            assert!(warning.starts_with(&format!("{misspelt} ")), "{warning}");
            assert!(warning.contains(meant), "{warning}");
        }
        let fields = fields();
        assert_eq!(unknown(fields.keys().map(|field| variable_of(field))), [""; 0]);
        assert_eq!(
            said(&["RINGSTOW_CONFIG", "RINGSTOW_PROGRESS", "RINGSTOW_BENCH_MB", "PATH"]),
            [""; 0]
        );
    }

    #[test]
    fn variables_of_the_tests_are_known() {
        for page in ["Makefile", "docs/internals/testing.md"] {
            let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
            let text = std::fs::read_to_string(page).unwrap();
            let words = text.split(|c: char| !c.is_ascii_uppercase() && c != '_');
            assert_eq!(unknown(words.map(Into::into)), [""; 0]);
        }
    }
}
