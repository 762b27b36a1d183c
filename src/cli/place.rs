//! Paths as arguments: expands `~` where the shell does not (`--stripe=~/b`).

use crate::sys::{environment, path};
use clap::builder::{OsStringValueParser, TypedValueParser};
use nix::unistd::{Uid, User};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Parses a local path.
pub fn place() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|text| local(&text))
}

/// Parses a local path, or the URL of a checkpoint in an object store.
pub fn place_or_url() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|text| match path::is_object(Path::new(&text)) {
        true => Ok(PathBuf::from(text)),
        false if is_other_url(&text.to_string_lossy()) => Err(format!(
            "{} is a URL of no kind that is known here: name s3://bucket/…, gs://…, az://…, abfss://… or a directory",
            text.display()
        )),
        false => local(&text),
    })
}

/// Whether this is a URL of another kind, or one that lacks a slash.
fn is_other_url(text: &str) -> bool {
    let Some((scheme, rest)) = text.split_once(":/") else { return false };
    let is_scheme = !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_scheme && (rest.starts_with('/') || ["s3", "gs", "az", "abfss"].contains(&scheme))
}

fn local(text: &OsStr) -> Result<PathBuf, String> {
    let path = at_home(Path::new(text), home_of)?;
    path::check(&path).map_err(|why| why.to_string())?;
    Ok(path)
}

/// Replaces a leading `~` or `~user`.
fn at_home(path: &Path, home_of: impl Fn(&OsStr) -> Option<PathBuf>) -> Result<PathBuf, String> {
    let mut parts = path.components();
    let first = parts.next().map(|first| first.as_os_str().to_owned()).unwrap_or_default();
    let Some(user) = first.as_bytes().strip_prefix(b"~") else { return Ok(path.into()) };
    let Some(home) = home_of(OsStr::from_bytes(user)) else {
        let (path, first) = (path.display(), first.display());
        return Err(format!(
            "no home directory is known for {first} (write ./{path} for a directory of this name)"
        ));
    };
    Ok(if parts.as_path().as_os_str().is_empty() { home } else { home.join(parts) })
}

/// Looks up the home directory of a user, or of the current user if the name is empty.
fn home_of(user: &OsStr) -> Option<PathBuf> {
    if !user.is_empty() {
        return User::from_name(user.to_str()?).ok().flatten().map(|user| user.dir);
    }
    let home = environment::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    home.or_else(|| User::from_uid(Uid::current()).ok().flatten().map(|user| user.dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_of_another_kind_is_no_path() {
        for url in ["http://x/y", "ftp://x", "s3:/bucket"] {
            assert!(is_other_url(url), "{url}");
        }
        for path in ["run", "a:/b", "/a/http://x", "./s3:/x"] {
            assert!(!is_other_url(path), "{path}");
        }
    }

    #[test]
    fn only_a_leading_tilde_is_expanded() {
        let home_of = |user: &OsStr| match user.as_bytes() {
            b"" => Some("/home/me".into()),
            b"you" => Some("/home/you".into()),
            _ => None,
        };
        for (given, meant) in [
            ("~", "/home/me"),
            ("~/a/b", "/home/me/a/b"),
            ("~you/a", "/home/you/a"),
            ("a/~", "a/~"),
            ("./~", "./~"),
            ("/x", "/x"),
        ] {
            assert_eq!(at_home(Path::new(given), home_of).unwrap(), Path::new(meant), "{given}");
        }
        let why = at_home(Path::new("~they/a"), home_of).unwrap_err();
        assert!(why.contains("~they ") && why.contains("./~they/a"), "{why}");
    }
}
