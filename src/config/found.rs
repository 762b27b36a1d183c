//! The configuration from `ringstow.toml` and the environment.

use super::Config;
use super::variables::{FILE_VARIABLE, fields, said_by, unknown, value, variable_of};
use crate::error::{Error, Result};
use crate::sys::dir::is_file;
use crate::sys::environment;
use crate::sys::file::read_given;
use crate::sys::fork::{GENERATIONS, PerProcess};
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::str::Utf8Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use toml::Table;

const FILE_NAME: &str = "ringstow.toml";
/// Longer files are not read: reading TOML takes 70 times its size in memory, which this keeps below 1 MiB.
const FILE_BYTES_MAX: u64 = 12 << 10;

impl Config {
    /// Reads the configuration. The value of each field comes from the first of these that sets it:
    ///
    /// 1. its variable, such as `RINGSTOW_POOL_BYTES=1G`, unless that is empty,
    /// 2. the file that `RINGSTOW_CONFIG` names, or else `ringstow.toml` in the current directory,
    /// 3. the default.
    ///
    /// In `./ringstow.toml`, `stripe`, `tiers` and `trace` are ignored with a warning, unless `RINGSTOW_CONFIG` names that
    /// file: they are paths to write to, and the directory may be a download. Logs once per process which file it reads.
    ///
    /// In a variable, a boolean is `true`, `on`, `yes` or `1`, or `false`, `off`, `no` or `0`, words may have any case,
    /// and colons separate paths and URLs. Everything else is written as in the file. Warns once per process of unknown variables
    /// that begin with `RINGSTOW_`.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the invalid variable; [`Error::Format`] with the file and line; [`Error::Io`] if the
    /// file cannot be read.
    pub fn found() -> Result<Self> {
        static WARNED: AtomicBool = AtomicBool::new(false);
        // Not `Once`: a thread waiting for it may hold a lock that the logging thread waits for.
        if !WARNED.swap(true, Relaxed) {
            let set = environment::vars_os().into_iter().filter(|(_, value)| !value.is_empty());
            let names = set.filter_map(|(name, _)| name.into_string().ok());
            unknown(names).iter().for_each(|warning| tracing::warn!("{warning}"));
        }
        found(Path::new(""), |name| environment::var_os(name))
    }

    /// The file that [`Config::found`] reads, and whether `RINGSTOW_CONFIG` names it; `None` if there is none.
    pub fn found_file() -> Option<(PathBuf, bool)> {
        match environment::var_os(FILE_VARIABLE).filter(|value| !value.is_empty()) {
            Some(named) => Some((named.into(), true)),
            None => is_file(FILE_NAME.as_ref()).then(|| (absolute(FILE_NAME.as_ref()), false)),
        }
    }
}

/// Fields that are paths to write to: ignored in a file that `RINGSTOW_CONFIG` does not name.
const NOT_FROM_ANYWHERE: &[&str] = &["stripe", "tiers", "trace"];

/// Messages already logged.
static LOGGED: PerProcess<Vec<String>> =
    PerProcess::new([const { Mutex::new(Vec::new()) }; GENERATIONS]);

/// Whether this message was not logged yet. The caller logs it, since logging may wait for a thread that waits for this
/// lock.
fn is_news(text: &str) -> bool {
    LOGGED.lock().is_some_and(|mut logged| {
        let is_new = !logged.iter().any(|known| known == text);
        if is_new {
            logged.push(text.to_owned());
        }
        is_new
    })
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.into())
}

/// Reads the settings of the configuration file.
fn of_file(dir: &Path, named: Option<String>) -> Result<Table> {
    // Messages have the whole path: their reader may not know the current directory.
    let path = absolute(&named.as_ref().map_or_else(|| dir.join(FILE_NAME), PathBuf::from));
    let table = read(&path, named.is_some())?;
    if table.is_empty() {
        return Ok(table);
    }
    let text = format!("reading the configuration from {}", path.display());
    if is_news(&text) {
        tracing::info!("{text}");
    }
    Ok(if named.is_some() { table } else { without_places(table, &path) })
}

/// Removes the settings that are ignored in a file that `RINGSTOW_CONFIG` does not name.
fn without_places(mut table: Table, path: &Path) -> Table {
    for field in NOT_FROM_ANYWHERE {
        let Some(value) = table.remove(*field) else { continue };
        let path = path.display();
        let text = format!(
            "ignored {field} = {value} in {path}: {field} is a path to write to, and {FILE_VARIABLE} does not name \
             this file. If you trust it, set {FILE_VARIABLE}={path}"
        );
        if is_news(&text) {
            tracing::warn!("{text}");
        }
    }
    table
}

fn found(dir: &Path, environment: impl Fn(&str) -> Option<OsString>) -> Result<Config> {
    let variable = |name: &str| said_by(name, environment(name));
    let mut table = of_file(dir, variable(FILE_VARIABLE)?)?;
    for (field, default) in fields() {
        let name = variable_of(&field);
        let Some(text) = variable(&name)? else { continue };
        let wrong =
            |why: &str| Error::invalid(format!("the environment says {name}={text}: {why}"));
        table.insert(field, value(&text, &default).map_err(wrong)?);
        config(&table).map_err(|why| wrong(&plain(why.message())))?;
    }
    let config = config(&table).map_err(|why| Error::invalid(why.message()))?;
    config.validate()?;
    Ok(config)
}

/// What serde says about a value, without Rust's names of types.
fn plain(why: &str) -> String {
    let why = why.trim_end();
    match why.rsplit_once("expected ") {
        Some((_, "u32" | "u64" | "usize")) => "it must be a whole number".into(),
        Some((unknown, words)) if unknown.starts_with("unknown variant") => {
            let words = words.trim_start_matches("one of ").replace('`', "");
            format!("it must be one of {words}")
        }
        _ => why.into(),
    }
}

/// Reads the settings of a file.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] for what is not UTF-8, and those of [`parse`].
pub fn read(path: &Path, must_be_there: bool) -> Result<Table> {
    let bytes = match read_given(path, FILE_BYTES_MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound && !must_be_there => {
            return Ok(Table::new());
        }
        Err(error) => {
            let hint = match error.kind() {
                ErrorKind::FileTooLarge => "it is too large for a configuration",
                _ => "",
            };
            return Err(Error::io("reading the configuration", path, error).hinted(hint));
        }
    };
    let text = std::str::from_utf8(&bytes).map_err(|why| not_text(path, &bytes, why))?;
    parse(text, path).map(|(table, _)| table)
}

/// The error for a file that is not UTF-8.
fn not_text(path: &Path, bytes: &[u8], why: Utf8Error) -> Error {
    let (offset, before) = (why.valid_up_to(), &bytes[..why.valid_up_to()]);
    let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
    let byte = bytes[offset];
    let reason = format!(
        "it is not UTF-8, which a configuration must be: byte 0x{byte:02x} at offset {offset}, in line {line}"
    );
    Error::format(path, reason)
}

/// The settings in the text of a configuration file, and the configuration that they make of the defaults.
///
/// # Errors
/// [`Error::Format`] naming `path` and the line.
pub fn parse(text: &str, path: &Path) -> Result<(Table, Config)> {
    // Deserialize from the text, so that errors have line numbers.
    let wrong = |why: toml::de::Error| Error::format(path, why.to_string().trim_end());
    let config = toml::from_str::<Config>(text).map_err(wrong)?;
    config.validate().map_err(|why| match why {
        Error::Invalid { reason } => Error::format(path, reason),
        other => other,
    })?;
    Ok((text.parse().map_err(wrong)?, config))
}

fn config(table: &Table) -> std::result::Result<Config, toml::de::Error> {
    table.clone().try_into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{EngineChoice, Switch};
    use serde_json::json;
    use std::collections::HashMap;
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;

    fn with(variables: &[(&str, &str)]) -> Result<Config> {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        found(Path::new(""), |name| variables.get(name).map(Into::into))
    }

    fn file(text: &str) -> (tempfile::TempDir, String) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tuned.toml");
        fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap().to_owned();
        (dir, path)
    }

    #[test]
    fn file_of_endless_length_is_refused_unread() {
        let (_dir, path) = file("");
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        let error = with(&[("RINGSTOW_CONFIG", &path)]).unwrap_err().to_string();
        assert!(error.contains(&path) && error.contains("1099511627776 bytes"), "{error}");
        assert!(error.contains("too large for a config") && !error.contains("ulimit"), "{error}");
    }

    #[test]
    fn pipe_or_directory_in_the_place_of_the_file_is_refused_and_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (fifo, named) = (path.to_str().unwrap(), dir.path().to_str().unwrap());
        for error in [
            found(dir.path(), |_| None).unwrap_err(),
            with(&[(FILE_VARIABLE, fifo)]).unwrap_err(),
            with(&[(FILE_VARIABLE, named)]).unwrap_err(),
        ] {
            assert!(error.to_string().ends_with("not a regular file"), "{error}");
        }
        assert_eq!(with(&[(FILE_VARIABLE, "/dev/null")]).unwrap(), Config::default());
    }

    #[test]
    fn environment_overrides_file_and_file_overrides_defaults() {
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
    fn invalid_setting_error_names_variable_or_file_and_line() {
        let says = |variables: &[(&str, &str)], words: &[&str]| {
            let message = with(variables).unwrap_err().to_string();
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        };
        says(
            &[("RINGSTOW_POOL_BYTES", "lots")],
            &["RINGSTOW_POOL_BYTES=lots", "a number and a unit"],
        );
        says(
            &[("RINGSTOW_ENGINE", "warp")],
            &["RINGSTOW_ENGINE=warp: it must be one of auto, uring, portable, tokio-uring"],
        );
        says(&[("RINGSTOW_DIRECT", "1")], &["RINGSTOW_DIRECT=1: it must be one of auto, on, off"]);
        says(&[("RINGSTOW_BLOCK_BYTES", "1000")], &["block_bytes = 1000", "multiple of 4096"]);
        says(&[("RINGSTOW_CONFIG", "/no/such/file")], &["/no/such/file"]);
        let (_dir, path) = file("queue_depth = 8\nblock_size = 4096");
        says(&[("RINGSTOW_CONFIG", &path)], &["tuned.toml", "line 2", "block_size", "block_bytes"]);
        let (_dir, path) = file("queue_depth = 0");
        says(&[("RINGSTOW_CONFIG", &path)], &["tuned.toml", "queue_depth = 0"]);
    }

    #[test]
    fn word_in_a_variable_may_have_any_case() {
        let said = with(&[
            ("RINGSTOW_DIRECT", "ON"),
            ("RINGSTOW_FIXED", "Off"),
            ("RINGSTOW_ENGINE", "Uring"),
            ("RINGSTOW_POOL_BYTES", "Auto"),
            ("RINGSTOW_BLOCK_BYTES", "8MiB"),
            ("RINGSTOW_TRACE", "/Tmp/T"),
        ]);
        let (direct, fixed, engine) = (Switch::On, Switch::Off, EngineChoice::Uring);
        let trace = Some("/Tmp/T".into()); // a path keeps its case
        let block_bytes = 8 << 20;
        let expected = Config { direct, fixed, engine, trace, block_bytes, ..Config::default() };
        assert_eq!(said.unwrap(), expected);
    }

    #[test]
    fn setting_is_shown_as_one_would_write_it() {
        let shown = |pool_bytes| json!(Config { pool_bytes, ..Config::default() });
        assert_eq!((&shown(0)["pool_bytes"], &shown(9)["pool_bytes"]), (&json!("auto"), &json!(9)));
        assert_eq!(serde_json::from_value::<Config>(shown(0)).unwrap(), Config::default());
    }

    #[test]
    fn file_that_is_not_utf_8_is_refused_with_the_position() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE_NAME), b"queue_depth = 8\n# caf\xe9\n").unwrap();
        let error = found(dir.path(), |_| None).unwrap_err();
        assert!(matches!(error, Error::Format { .. }), "{error:?}");
        let said = error.to_string();
        assert!(said.contains("UTF-8") && said.contains("0xe9 at offset 21, in line 2"), "{said}");
    }

    #[test]
    fn error_in_an_unnamed_file_has_its_full_path() {
        let dir = tempfile::tempdir_in(".").unwrap();
        fs::write(dir.path().join(FILE_NAME), "queue_depth = 0").unwrap();
        let relative = Path::new(dir.path().file_name().unwrap());
        let said = found(relative, |_| None).unwrap_err().to_string();
        let path = fs::canonicalize(dir.path()).unwrap().join(FILE_NAME);
        assert!(said.starts_with(path.to_str().unwrap()), "{said}");
    }

    #[test]
    fn number_is_asked_for_in_plain_words() {
        for text in ["abc", "-1", "1.5"] {
            let why = with(&[("RINGSTOW_QUEUE_DEPTH", text)]).unwrap_err().to_string();
            assert!(why.ends_with("it must be a whole number"), "{why}");
        }
    }

    #[test]
    fn variable_that_is_not_utf_8_is_refused() {
        for name in ["RINGSTOW_STRIPE", "RINGSTOW_TRACE", "RINGSTOW_CONFIG"] {
            let path = OsStr::from_bytes(b"/mnt/b\xff");
            let asked = |asked: &str| (asked == name).then(|| path.into());
            let error = found(Path::new(""), asked).unwrap_err();
            let message = error.to_string();
            assert!(message.contains(name) && message.contains("UTF-8"), "{message}");
        }
    }

    #[test]
    fn stripe_is_a_list_in_file_and_colon_separated_in_variable() {
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
        let tiers = with(&[("RINGSTOW_TIERS", "/c:s3://bucket/run:/d:gs://b")]).unwrap().tiers;
        let expected = ["/c", "s3://bucket/run", "/d", "gs://b"].map(PathBuf::from);
        assert_eq!(tiers, expected);
        for (text, expected) in [
            ("gs://b:/d", vec!["gs://b", "/d"]),
            ("gs://b:s3://c:e", vec!["gs://b", "s3://c:e"]),
            ("s3://key:secret@b/run:/d", vec!["s3://key:secret@b/run", "/d"]),
        ] {
            let tiers = with(&[("RINGSTOW_TIERS", text)]).unwrap().tiers;
            assert_eq!(tiers, expected.into_iter().map(PathBuf::from).collect::<Vec<_>>());
        }
        let twice = with(&[("RINGSTOW_STRIPE", "/c:/c")]).unwrap_err().to_string();
        assert!(twice.contains("/c twice"), "{twice}");
        let none = with(&[("RINGSTOW_FILES", "0")]).unwrap_err().to_string();
        assert!(none.contains("files = 0"), "{none}");
    }

    #[test]
    fn unnamed_file_cannot_set_stripe_or_trace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        fs::write(&path, "trace = \"/victim\"\nstripe = [\"/mnt/b\"]\nqueue_depth = 3").unwrap();
        let (none, three) = (Config::default(), Config { queue_depth: 3, ..Config::default() });
        assert_eq!(found(dir.path(), |_| None).unwrap(), three);
        assert_eq!(found(Path::new("/proc"), |_| None).unwrap(), none);
        let named = found(dir.path(), |name| (name == FILE_VARIABLE).then(|| path.clone().into()));
        let stripe = vec![PathBuf::from("/mnt/b")];
        assert_eq!(named.unwrap(), Config { trace: Some("/victim".into()), stripe, ..three });
    }

    #[test]
    fn message_is_news_only_once() {
        assert!(is_news("of this test alone"));
        assert!(!is_news("of this test alone"));
    }

    #[test]
    fn every_field_has_a_variable() {
        let default = json!(fields());
        for field in fields().keys() {
            let (text, expected) = match field.as_str() {
                "pool_bytes" => ("1G", json!(1 << 30)),
                "block_bytes" => ("65536", json!(65536)),
                "queue_depth" => ("3", json!(3)),
                "fillers" => ("2", json!(2)),
                "nice" => ("10", json!(10)),
                "io_priority" => ("IDLE", json!("idle")),
                "write_rate" => ("500MB", json!(500_000_000)),
                "engine" => ("portable", json!("portable")),
                "direct" | "fixed" => ("off", json!("off")),
                "shard_bytes" => ("5GB", json!(5_000_000_000_u64)),
                "files" => ("4", json!(4)),
                "stripe" => ("/mnt/b:/mnt/c", json!(["/mnt/b", "/mnt/c"])),
                "recycle" => ("true", json!(true)),
                "tiers" => ("/mnt/b:s3://b/run", json!(["/mnt/b", "s3://b/run"])),
                "promotion_rate" => ("1M", json!(1 << 20)),
                "share_reads" => ("Group", json!("group")),
                "trace" => ("7", json!("7")),
                new => panic!("add a value for {new} here"),
            };
            let name = variable_of(field);
            let config = with(&[(&name, text)]).unwrap_or_else(|e| panic!("{name}={text}: {e}"));
            let mut all = default.clone();
            assert_ne!(all[field], expected, "{name}={text} is the default");
            all[field] = expected;
            assert_eq!(serde_json::to_value(config).unwrap(), all, "{name}={text}");
        }
    }

    #[test]
    fn booleans_have_four_words_each() {
        let (_dir, path) = file("recycle = true");
        let says = |text| with(&[("RINGSTOW_CONFIG", &path), ("RINGSTOW_RECYCLE", text)]);
        for text in ["true", "on", "yes", "1", "TRUE", "Yes"] {
            assert!(with(&[("RINGSTOW_RECYCLE", text)]).unwrap().recycle, "{text}");
        }
        for text in ["false", "off", "no", "0", "False", "OFF"] {
            assert!(!says(text).unwrap().recycle, "{text}");
        }
        for text in ["maybe", "2", "auto"] {
            let why = says(text).unwrap_err().to_string();
            assert!(why.contains(&format!("RINGSTOW_RECYCLE={text}")), "{why}");
            assert!(why.contains("true, on, yes or 1"), "{why}");
        }
    }
}
