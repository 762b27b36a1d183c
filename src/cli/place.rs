//! Paths as they are given to the program: `~` is a home directory, also where no shell made it one
//! (`--stripe=~/b`).

use crate::sys::path;
use clap::builder::{OsStringValueParser, TypedValueParser};
use nix::unistd::{Uid, User};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Takes a path of this machine's.
pub fn place() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|text: OsString| {
        let path = at_home(Path::new(&text), home_of)?;
        path::check(&path).map_err(|why| why.to_string())?;
        Ok::<_, String>(path)
    })
}

/// The path with its `~` or `~user` replaced.
fn at_home(path: &Path, home_of: impl Fn(&OsStr) -> Option<PathBuf>) -> Result<PathBuf, String> {
    let mut parts = path.components();
    let first = parts.next().map(|first| first.as_os_str().to_owned()).unwrap_or_default();
    let Some(user) = first.as_bytes().strip_prefix(b"~") else { return Ok(path.into()) };
    let Some(home) = home_of(OsStr::from_bytes(user)) else {
        let (path, first) = (path.display(), first.display());
        return Err(format!(
            "nobody knows the home directory {first} (a directory of this name is ./{path})"
        ));
    };
    Ok(if parts.as_path().as_os_str().is_empty() { home } else { home.join(parts) })
}

/// The home directory of a user; of the one that runs this, if the name is empty.
fn home_of(user: &OsStr) -> Option<PathBuf> {
    if !user.is_empty() {
        return User::from_name(user.to_str()?).ok().flatten().map(|user| user.dir);
    }
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    home.or_else(|| User::from_uid(Uid::current()).ok().flatten().map(|user| user.dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn homes_are_expanded_and_nothing_else_is() {
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
