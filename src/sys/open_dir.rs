//! A directory that is open, and the names in it. What is done to such a name is done in the directory that was opened,
//! whatever has its path by now: another program may move it away, and put a link to somebody's data in its place.

use crate::error::{Error, Result};
use crate::sys::dir::{self, At};
use crate::sys::file;
use crate::sys::seam::{Call, made};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An open directory.
#[derive(Debug)]
pub(crate) struct Dir {
    file: File,
    path: PathBuf,
    /// The one that it was opened in.
    above: Option<Arc<Dir>>,
    /// Whether its path may be a link.
    follows: bool,
}

impl Dir {
    /// Opens the directory that a path leads to: one that the caller names may be a link.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        let opened = Self::opened(path, None, true);
        opened.map_err(|error| Error::io("opening", path, error))
    }

    /// Opens a directory, and nothing that a link leads to. Links above it are followed.
    ///
    /// # Errors
    /// [`Error::Io`]; that of [`refuse_link`].
    pub fn open_real(path: &Path) -> Result<Arc<Self>> {
        Self::opened(path, None, false).map_err(|error| refused(path, error))
    }

    /// [`Dir::open_real`] for a path in this directory.
    ///
    /// # Errors
    /// As for [`Dir::open_real`].
    pub fn open_in(self: &Arc<Self>, path: &Path) -> Result<Arc<Self>> {
        Self::opened(path, Some(self), false).map_err(|error| refused(path, error))
    }

    fn opened(path: &Path, above: Option<&Arc<Self>>, follows: bool) -> io::Result<Arc<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let flags = if follows { flags } else { flags | OFlags::NOFOLLOW };
        let (dir, name) = place(path, above, follows);
        let file = made(Call::Open, path, || Ok(openat(dir, &name, flags, Mode::empty())?))?;
        Ok(Arc::new(Self { file: file.into(), path: path.into(), above: above.cloned(), follows }))
    }

    /// Opens the directory that holds this one, wherever this one is now.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn holder(&self) -> Result<Arc<Self>> {
        let real = dir::real(&self.path)?;
        let path = real.parent().unwrap_or(&real);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = made(Call::Open, path, || Ok(openat(&self.file, "..", flags, Mode::empty())?));
        let file = opened.map_err(|error| Error::io("opening", path, error))?.into();
        Ok(Arc::new(Self { file, path: path.into(), above: None, follows: true }))
    }

    /// Its path when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open directory itself.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// A file in it, by its path.
    ///
    /// # Panics
    /// If the path has no name.
    pub fn at<'a>(&'a self, path: &'a Path) -> At<'a> {
        assert_eq!(path.parent(), Some(&*self.path), "a file of another directory");
        At { dir: self.file.as_fd(), name: name(path), path }
    }

    /// The directory itself, by its name in the one that it was opened in.
    pub fn itself(&self) -> At<'_> {
        match &self.above {
            Some(above) => At { dir: above.file.as_fd(), name: name(&self.path), path: &self.path },
            None => At::from(&self.path),
        }
    }

    /// Whether its path, or its name in the one that it was opened in, still leads to it.
    ///
    /// # Errors
    /// The system's.
    pub fn is_here(&self) -> io::Result<bool> {
        let (dir, name) = place(&self.path, self.above.as_ref(), self.follows);
        let flags = if self.follows { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        let own = file::look(&self.file)?;
        let there = made(Call::Look, &*self.path, || Ok(statat(dir, &name, flags)?))?;
        Ok((own.dev(), own.ino()) == (there.st_dev as u64, there.st_ino as u64))
    }

    /// Checks that what was read by its path was read from it.
    ///
    /// # Errors
    /// [`Error::Io`], also if nothing has the path by now; [`Error::Invalid`] if something else has.
    pub fn check(&self) -> Result<()> {
        self.above.as_ref().map_or(Ok(()), |above| above.check())?;
        if self.is_here().map_err(|error| Error::io("opening", &self.path, error))? {
            return Ok(());
        }
        refuse_link(&self.path)?;
        Err(Error::invalid(format!(
            "another directory has the path {} by now, and nothing was done to that: call again, once nobody moves it",
            self.path.display()
        )))
    }

    /// The names in it, and whether each is a directory's. In no order.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn names(&self) -> Result<Vec<(PathBuf, bool)>> {
        let listed = made(Call::List, &*self.path, || self.list());
        listed.map_err(|error| Error::io("listing", &self.path, error))
    }

    fn list(&self) -> io::Result<Vec<(PathBuf, bool)>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.file)? {
            let entry = entry?;
            let name = Path::new(OsStr::from_bytes(entry.file_name().to_bytes()));
            if [Path::new("."), Path::new("..")].contains(&name) {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    let found = statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW)?;
                    FileType::from_raw_mode(found.st_mode)
                }
                kind => kind,
            };
            names.push((name.into(), kind == FileType::Directory));
        }
        Ok(names)
    }

    /// As [`dir::file_names`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn file_names(&self) -> Result<Vec<String>> {
        let files = self.names()?.into_iter().filter(|(_, is_dir)| !is_dir);
        let mut names: Vec<String> =
            files.filter_map(|(name, _)| name.into_os_string().into_string().ok()).collect();
        names.sort();
        Ok(names)
    }

    /// As [`dir::sync`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<()> {
        self.try_sync().map_err(|error| Error::io("syncing", &self.path, error))
    }

    /// As [`dir::try_sync`].
    ///
    /// # Errors
    /// The system's.
    pub fn try_sync(&self) -> io::Result<()> {
        dir::try_sync_open(&self.file, &self.path)
    }
}

/// How the system gets the path of a directory.
fn place<'a>(
    path: &'a Path,
    above: Option<&'a Arc<Dir>>,
    follows: bool,
) -> (BorrowedFd<'a>, PathBuf) {
    match above {
        Some(above) => (above.file.as_fd(), name(path).into()),
        None if follows => (CWD, path.into()),
        None => (CWD, itself(path)),
    }
}

/// Without what would make the system follow a link at its end: `/`, `/.`.
fn itself(path: &Path) -> PathBuf {
    path.components().collect()
}

fn name(path: &Path) -> &Path {
    Path::new(path.file_name().expect("what is in a directory has a name"))
}

fn refused(path: &Path, error: io::Error) -> Error {
    refuse_link(path).err().unwrap_or_else(|| Error::io("opening", path, error))
}

/// Refuses a link: another program may rely on it, and would find no checkpoint there.
///
/// # Errors
/// [`Error::Invalid`]; [`Error::Io`] for one that leads nowhere.
pub(crate) fn refuse_link(dir: &Path) -> Result<()> {
    let itself = itself(dir);
    if !dir::is_link(&itself) {
        return Ok(());
    }
    let to = dir::try_real(&itself).map_err(|e| Error::io("following the link", &itself, e))?;
    Err(Error::invalid(format!(
        "{} is a link to {}: pass that path instead, and change or remove the link yourself",
        itself.display(),
        to.display()
    )))
}
