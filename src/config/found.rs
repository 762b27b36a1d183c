//! The configuration that the user's surroundings ask for: `ringstow.toml` and the environment.

use super::{Config, FIELDS};
use crate::error::{Error, Result};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Names another file than `ringstow.toml` in the current directory.
const FILE_VARIABLE: &str = "RINGSTOW_CONFIG";
const FILE_NAME: &str = "ringstow.toml";

impl Config {
    /// What the environment asks for (`RINGSTOW_POOL_BYTES=1G`, one variable a field), over what the
    /// file says that `RINGSTOW_CONFIG` names, or `ringstow.toml` in the current directory if it is
    /// there, over the defaults. An empty variable says nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the variable, or the file and the place in it, that cannot be;
    /// [`Error::Io`] for a file that cannot be read.
    pub fn found() -> Result<Self> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        found(variable)
    }
}

fn found(variable: impl Fn(&str) -> Option<String>) -> Result<Config> {
    let mut table = match variable(FILE_VARIABLE) {
        Some(path) => read(&PathBuf::from(path), true)?,
        None => read(Path::new(FILE_NAME), false)?,
    };
    for field in FIELDS {
        let name = format!("RINGSTOW_{}", field.to_uppercase());
        let Some(text) = variable(&name) else { continue };
        let value = match *field {
            "stripe" => paths(&text),
            _ => text.parse().map_or_else(|_| Value::String(text.clone()), Value::Integer),
        };
        table.insert((*field).into(), value);
        config(&table).map_err(|why| {
            Error::invalid(format!("the environment says {name}={text}: {}", why.message()))
        })?;
    }
    let config = config(&table).map_err(|why| Error::invalid(why.message()))?;
    config.validate()?;
    Ok(config)
}

/// Several paths, as in `PATH`: separated by colons.
fn paths(text: &str) -> Value {
    let paths = text.split(':').filter(|path| !path.is_empty());
    Value::Array(paths.map(|path| Value::String(path.into())).collect())
}

fn read(path: &Path, must_be_there: bool) -> Result<Table> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound && !must_be_there => {
            return Ok(Table::new());
        }
        Err(error) => return Err(Error::io("reading the configuration", path, error)),
    };
    // Of the text, so that what is wrong is shown with its line.
    let wrong = |why: toml::de::Error| Error::format(path, why.to_string());
    toml::from_str::<Config>(&text).map_err(wrong)?.validate().map_err(|why| match why {
        Error::Invalid { reason } => Error::format(path, reason),
        other => other,
    })?;
    text.parse().map_err(wrong)
}

fn config(table: &Table) -> std::result::Result<Config, toml::de::Error> {
    table.clone().try_into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EngineChoice, Switch};
    use std::collections::HashMap;
    use std::fs;

    fn with(variables: &[(&str, &str)]) -> Result<Config> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        found(|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    fn file(text: &str) -> (tempfile::TempDir, String) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tuned.toml");
        fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap().to_owned();
        (dir, path)
    }

    #[test]
    fn the_environment_goes_over_the_file_and_that_over_the_defaults() {
        let (_dir, path) = file("pool_bytes = \"64M\"\nqueue_depth = 16\ndirect = \"off\"");
        let config = with(&[
            ("RINGSTOW_CONFIG", &path),
            ("RINGSTOW_QUEUE_DEPTH", "32"),
            ("RINGSTOW_ENGINE", "portable"),
        ])
        .unwrap();
        let expected = Config {
            pool_bytes: 64 << 20,
            queue_depth: 32,
            direct: Switch::Off,
            engine: EngineChoice::Portable,
            ..Config::default()
        };
        assert_eq!(config, expected);
        assert_eq!(with(&[]).unwrap(), Config::default());
    }

    #[test]
    fn what_cannot_be_is_named_with_its_place() {
        let says = |variables: &[(&str, &str)], words: &[&str]| {
            let message = with(variables).unwrap_err().to_string();
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        };
        says(
            &[("RINGSTOW_POOL_BYTES", "lots")],
            &["RINGSTOW_POOL_BYTES=lots", "a number and a unit"],
        );
        says(&[("RINGSTOW_ENGINE", "warp")], &["RINGSTOW_ENGINE=warp", "portable"]);
        says(&[("RINGSTOW_BLOCK_BYTES", "1000")], &["block_bytes = 1000", "multiple of 4096"]);
        says(&[("RINGSTOW_CONFIG", "/no/such/file")], &["/no/such/file"]);
        let (_dir, path) = file("queue_depth = 8\nblock_size = 4096");
        says(&[("RINGSTOW_CONFIG", &path)], &["tuned.toml", "line 2", "block_size", "block_bytes"]);
        let (_dir, path) = file("queue_depth = 0");
        says(&[("RINGSTOW_CONFIG", &path)], &["tuned.toml", "queue_depth = 0"]);
    }

    #[test]
    fn stripes_are_a_list_in_the_file_and_separated_by_colons_in_the_environment() {
        let (_dir, path) = file("stripe = [\"/mnt/b\", \"7\"]\nfiles = 2");
        let config = with(&[("RINGSTOW_CONFIG", &path)]).unwrap();
        assert_eq!(config.stripe, [Path::new("/mnt/b"), Path::new("7")]);
        assert_eq!(config.files, 2);
        for (text, paths) in
            [("/c", &["/c"][..]), ("/c:/d e:", &["/c", "/d e"]), ("8", &["8"]), (":", &[])]
        {
            let over = with(&[("RINGSTOW_CONFIG", &path), ("RINGSTOW_STRIPE", text)]).unwrap();
            let expected: Vec<&Path> = paths.iter().map(Path::new).collect();
            assert_eq!(over.stripe, expected, "{text}");
        }
        let twice = with(&[("RINGSTOW_STRIPE", "/c:/c")]).unwrap_err().to_string();
        assert!(twice.contains("/c twice"), "{twice}");
        let none = with(&[("RINGSTOW_FILES", "0")]).unwrap_err().to_string();
        assert!(none.contains("files = 0"), "{none}");
    }

    #[test]
    fn every_field_can_be_asked_for() {
        let config = serde_json::to_value(Config::default()).unwrap();
        let fields: Vec<&str> = config.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields, FIELDS);
    }
}
