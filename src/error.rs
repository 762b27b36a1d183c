//! The one error type. Every variant says where, what was expected, and what to do about it.

mod remedy;

#[cfg(feature = "cli")]
pub(crate) use remedy::NO_INODES;
pub use remedy::Shortage;
pub(crate) use remedy::{is_bad_medium, is_full, is_one_of, is_unsupported};

use nix::errno::Errno;
use remedy::{UNDONE, advice, missing_resource};
use std::io;
use std::path::{Path, PathBuf};

/// `Result` with ringstow's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong while saving, loading or checking a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused: no space, no permission, no such file, a failing disk.
    ///
    /// The message ends with the system's own, so [`source`](std::error::Error::source) is `None` and a printed
    /// chain of sources says everything once.
    #[error("{doing} {}{}: {cause}{}", path.display(), at(*offset), advice(cause, *shortage, hint))]
    Io {
        /// What was being done, as a verb phrase: `"writing"`, `"opening"`.
        doing: &'static str,
        /// The file or directory concerned.
        path: PathBuf,
        /// Byte offset in that file, where one applies.
        offset: Option<u64>,
        /// The system's error; see also [`Error::io_error`].
        cause: io::Error,
        /// What the file system lacks for a save, where that is known.
        shortage: Option<Shortage>,
        /// What is at the path instead, and what to do; empty if nothing more is known.
        hint: String,
    },

    /// The path holds no checkpoint: nothing was saved there, another program's files are there, or the
    /// checkpoint was removed. [`Error::is_incomplete`] covers this variant and the next three.
    #[error("{} is not a checkpoint: {reason}", path.display())]
    NoCheckpoint {
        /// The directory.
        path: PathBuf,
        /// What the directory holds, and what to do.
        reason: String,
    },

    /// The directory holds files of a save that is in progress or was killed before its commit, or of a killed removal.
    #[error("{} is not a committed checkpoint: {reason}", path.display())]
    NotCommitted {
        /// The checkpoint's directory.
        path: PathBuf,
        /// What is missing, and what to do.
        reason: String,
    },

    /// A rank's share is missing: the directory holds one rank's share of what several ranks saved each by
    /// itself, with only some elements of a requested tensor, or the coordinator does not see what a rank wrote.
    #[error("{} is not a complete checkpoint: {reason}", path.display())]
    MissingShare {
        /// The checkpoint's directory.
        path: PathBuf,
        /// Which elements or which rank's files are missing, and what to do.
        reason: String,
    },

    /// The checkpoint was committed, and files that it lists are missing.
    #[error("{} is not a complete checkpoint: {reason}", path.display())]
    MissingFiles {
        /// The checkpoint's directory.
        path: PathBuf,
        /// Which files are missing, and what to do.
        reason: String,
    },

    /// Bytes on disk are not the bytes that were written.
    #[error("{} is damaged at offset {offset}{}: {what} should be {expected}, is {got}; \
             restore the file from a copy, or {}", path.display(), which_holds(tensors), 
             advice.text())]
    Corrupt {
        /// The damaged file.
        path: PathBuf,
        /// Byte offset in that file at which the damaged region starts.
        offset: u64,
        /// What was compared: `"crc32 of checksum chunk 7"`, `"length in bytes"`.
        what: Box<str>,
        /// The value recorded when the checkpoint was written.
        expected: String,
        /// The value found now.
        got: String,
        /// The names of the tensors with bytes in the damaged range, where known.
        tensors: Box<[String]>,
        /// What to do besides.
        advice: Advice,
    },

    /// A manifest or header that cannot be what ringstow wrote: bad JSON, ranges that overlap or
    /// overflow, file names that leave the directory.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file concerned.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A GPU, or its driver, refused or failed.
    #[error("{doing} GPU {device} failed: {reason}; {remedy}")]
    Gpu {
        /// What was being done, as a verb phrase: `"copying to the host from"`.
        doing: &'static str,
        /// The GPU's number.
        device: u32,
        /// What the driver said, by its name for the error.
        reason: String,
        /// What to do.
        remedy: String,
    },

    /// The caller requires something that this version, build, kernel or file system cannot do.
    #[error("{what}; {remedy}")]
    Unsupported {
        /// What cannot be done, and why.
        what: String,
        /// What to do instead.
        remedy: String,
    },

    /// A thread that saved, loaded or copied panicked: a bug, in ringstow or in a tensor view or check of the caller's. An
    /// earlier checkpoint is untouched.
    #[error(
        "the {work} panicked: {message}; an earlier checkpoint is untouched. If the panic is not your code's, \
             please report it, with RUST_BACKTRACE=1"
    )]
    Panicked {
        /// `"save"`, `"load"` or `"copy"`.
        work: &'static str,
        /// The panic's message; empty if it had none.
        message: String,
    },

    /// An argument or value of the caller is invalid.
    #[error("{reason}")]
    Invalid {
        /// What is wrong with it; names the key where one applies.
        reason: String,
    },

    /// The checkpoint and the request do not have the same tensors.
    #[error("{}", key_mismatch(path, missing, unexpected, mismatched))]
    Keys {
        /// The checkpoint's directory.
        path: PathBuf,
        /// Requested names that the checkpoint does not have.
        missing: Vec<String>,
        /// Names in the checkpoint that were not requested (strict loads only).
        unexpected: Vec<String>,
        /// Tensors whose dtype or shape differs, each as a sentence.
        mismatched: Vec<String>,
    },

    /// Another save into the same directory is in progress.
    #[error("another save into {} is in progress (in this process, in another or on another host); \
             wait for it, or save to another path", path.display())]
    Busy {
        /// The checkpoint's directory.
        path: PathBuf,
    },

    /// Another [manager](crate::CheckpointManager) saves into the run's directory: two trainings would mix their steps.
    #[error("{} is saved into by {holder}: two trainings would mix their steps. End that one, or save into another \
             directory. Loads and `restore` work meanwhile", path.display())]
    RunBusy {
        /// The run's directory.
        path: PathBuf,
        /// Who saves there.
        holder: String,
    },

    /// Another save replaced the checkpoint after it was opened and before its files were. Nothing of the two was
    /// mixed.
    #[error("{} was replaced by another save after it was opened: open it again to load the newer \
             checkpoint", path.display())]
    Replaced {
        /// The checkpoint's directory.
        path: PathBuf,
    },

    /// [`Store::slim`](crate::Store::slim) has removed files that the load needs since the checkpoint was opened. The rest still loads.
    #[error("`slim` has dropped {} from {} since it was opened: load the rest by its names, or open it again",
            dropped.join(" and "), path.display())]
    Slimmed {
        /// The checkpoint's directory.
        path: PathBuf,
        /// The names below which it has dropped everything.
        dropped: Vec<String>,
    },

    /// A save is committed, and the last sync after that failed: readers see the new checkpoint, and a crash or power
    /// cut may bring the earlier one back. The files of both are there. An export returns it if the disk also refuses to
    /// remove the exported model again.
    #[error("{} is committed, but may not survive a crash or power cut: syncing the directory failed: {cause}; \
             the files of an earlier checkpoint are kept. See the kernel's log (dmesg), and save again, best to \
             another disk", path.display())]
    NotDurable {
        /// The checkpoint's directory.
        path: PathBuf,
        /// The system's error; see also [`Error::io_error`].
        cause: io::Error,
    },

    /// The caller cancelled the operation.
    #[error("{} was cancelled; an earlier checkpoint at this path, if any, is untouched", path.display())]
    Cancelled {
        /// The checkpoint's directory.
        path: PathBuf,
    },
}

/// What to do about a checkpoint that cannot be removed, since its manifest is damaged.
const BY_HAND: &str = "remove the checkpoint's directory yourself (and its directories on other disks, if it was striped): \
                       the manifest alone says which files are the checkpoint's";

/// What to do about a checkpoint that is damaged or incomplete.
pub(crate) const GO_BACK: &str =
    "go back to an earlier checkpoint: `latest(dir, verify=True)` finds the newest that is intact";

/// The same where no step is left to go back to.
const SALVAGE: &str = "load what is intact: no other step that `latest` looked at can be loaded. `load(step, \
                       on_corrupt=\"skip\")` of the newest returns its intact tensors, and `ringstow verify` of each \
                       step says which are damaged; see docs/operations.md, \"A checkpoint is damaged\"";

/// What to do about a damaged file, besides restoring it from a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Advice {
    /// Go back to an earlier checkpoint.
    #[default]
    GoBack,
    /// Load what is intact: `latest` found no other step that can be loaded.
    Salvage,
    /// Remove the checkpoint by hand: its manifest is damaged, so a removal does not know its files.
    RemoveByHand,
    /// Write the file again: it is a stream's, and no checkpoint's.
    WriteAgain,
    /// Download the file again: another program's, which has no earlier one.
    Download,
}

impl Advice {
    fn text(self) -> &'static str {
        match self {
            Self::GoBack => GO_BACK,
            Self::Salvage => SALVAGE,
            Self::RemoveByHand => BY_HAND,
            Self::WriteAgain => "write it again",
            Self::Download => "download it again",
        }
    }
}

impl Error {
    /// An [`Error::Io`] without an offset.
    pub fn io(doing: &'static str, path: impl Into<PathBuf>, cause: io::Error) -> Self {
        let hint = missing_resource(doing, &cause).unwrap_or_default().into();
        Self::Io { doing, path: path.into(), offset: None, cause, shortage: None, hint }
    }

    /// An [`Error::Io`] at a byte offset of a file.
    pub fn io_at(
        doing: &'static str,
        path: impl Into<PathBuf>,
        offset: u64,
        cause: io::Error,
    ) -> Self {
        let (path, offset, hint) = (path.into(), Some(offset), String::new());
        Self::Io { doing, path, offset, cause, shortage: None, hint }
    }

    /// The system's error, if this is an [`Error::Io`] or [`Error::NotDurable`].
    pub fn io_error(&self) -> Option<&io::Error> {
        match self {
            Self::Io { cause, .. } | Self::NotDurable { cause, .. } => Some(cause),
            _ => None,
        }
    }

    /// Whether the path holds no checkpoint that can be loaded, or only some of one: [`Error::NoCheckpoint`],
    /// [`Error::NotCommitted`], [`Error::MissingShare`] or [`Error::MissingFiles`].
    pub fn is_incomplete(&self) -> bool {
        matches!(
            self,
            Self::NoCheckpoint { .. }
                | Self::NotCommitted { .. }
                | Self::MissingShare { .. }
                | Self::MissingFiles { .. }
        )
    }

    /// Whether it concerns one checkpoint alone, so that another or a copy may be intact: damage, a bad sector, a removal.
    pub(crate) fn is_of_checkpoint(&self) -> bool {
        match self {
            Self::Corrupt { .. } | Self::Format { .. } => true,
            Self::Io { cause, .. } => {
                cause.kind() == io::ErrorKind::NotFound || is_bad_medium(cause)
            }
            error => error.is_incomplete(),
        }
    }

    /// Advises to salvage, instead of going back to an earlier checkpoint, of which there is none.
    pub(crate) fn without_earlier(mut self) -> Self {
        if let Self::MissingFiles { reason, .. } = &mut self {
            *reason = reason.replace(GO_BACK, SALVAGE);
        }
        self.advising(Advice::Salvage)
    }

    /// Advises to remove by hand a checkpoint whose manifest is damaged or cannot be read.
    pub(crate) fn removed_by_hand(mut self) -> Self {
        if let Self::Io { hint, .. } = &mut self {
            *hint = BY_HAND.into();
        }
        self.advising(Advice::RemoveByHand)
    }

    /// Adds to an [`Error::Io`] what is at the path instead, and what to do.
    pub(crate) fn hinted(mut self, text: impl Into<String>) -> Self {
        if let Self::Io { hint, .. } = &mut self {
            *hint = text.into();
        }
        self
    }

    /// Adds to an [`Error::Io`] what the file system lacks.
    pub(crate) fn short_of(mut self, lack: Shortage) -> Self {
        if let Self::Io { shortage, .. } = &mut self {
            *shortage = Some(lack);
        }
        self
    }

    /// The system's number of an [`Error::Io`]. What an object store says has that of its meaning, if it has one.
    pub fn errno(&self) -> Option<i32> {
        let cause = self.io_error()?;
        let of_kind = match cause.kind() {
            io::ErrorKind::NotFound => Some(Errno::ENOENT),
            io::ErrorKind::PermissionDenied => Some(Errno::EACCES),
            io::ErrorKind::AlreadyExists => Some(Errno::EEXIST),
            _ => None,
        };
        cause.raw_os_error().or(of_kind.map(|errno| errno as i32))
    }

    /// The message of an [`Error::Io`] without its path and error number, for languages whose errors print these. `None` for any other error.
    pub fn without_path(&self) -> Option<String> {
        let Self::Io { doing, offset, cause, shortage, hint, .. } = self else { return None };
        let text = cause.to_string();
        let number = cause.raw_os_error().map(|errno| format!(" (os error {errno})"));
        let text = number.and_then(|number| text.strip_suffix(&number)).unwrap_or(&text);
        Some(format!("{doing}{}: {text}{}", at(*offset), advice(cause, *shortage, hint)))
    }

    /// Whether the system reported that a file or directory does not exist.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { cause, .. } if cause.kind() == io::ErrorKind::NotFound)
    }

    /// Whether the system reported that a name is taken.
    pub(crate) fn is_taken(&self) -> bool {
        matches!(self, Self::Io { cause, .. } if cause.kind() == io::ErrorKind::AlreadyExists)
    }

    /// Whether bytes differ from those that were written, or cannot be read: a bad sector, or damage that the file
    /// system found.
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            Self::Corrupt { .. } | Self::Format { .. } => true,
            Self::Io { doing: "reading", cause, .. } => is_bad_medium(cause),
            _ => false,
        }
    }

    /// [`Error::is_damage`] of something in this directory.
    pub(crate) fn is_damage_in(&self, dir: &Path) -> bool {
        match self {
            Self::Corrupt { path, .. } | Self::Format { path, .. } | Self::Io { path, .. } => {
                self.is_damage() && path.starts_with(dir)
            }
            _ => false,
        }
    }

    /// Whether the system reported a full disk or an exhausted quota.
    pub(crate) fn is_disk_full(&self) -> bool {
        matches!(self, Self::Io { cause, .. } if is_full(cause))
    }

    /// Adds to the error of a save that met a full disk how much room the run needs.
    pub(crate) fn needing_room(self, room: &str) -> Self {
        match &self {
            Self::Io { hint, shortage, .. }
                if self.is_disk_full()
                    && hint.is_empty()
                    && *shortage != Some(Shortage::Inodes) =>
            {
                self.hinted(format!("{room}. {UNDONE}"))
            }
            _ => self,
        }
    }

    /// An [`Error::Corrupt`] of bytes that belong to no tensor.
    pub(crate) fn corrupt(
        path: &Path,
        offset: u64,
        what: &str,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        let (path, what, expected, got) = (path.into(), what.into(), expected.into(), got.into());
        let (tensors, advice) = (Box::default(), Advice::GoBack);
        Self::Corrupt { path, offset, what, expected, got, tensors, advice }
    }

    /// The same error, with this advice if it is an [`Error::Corrupt`].
    pub(crate) fn advising(mut self, what: Advice) -> Self {
        if let Self::Corrupt { advice, .. } = &mut self {
            *advice = what;
        }
        self
    }

    /// An [`Error::Format`].
    pub fn format(path: impl Into<PathBuf>, reason: impl Into<String>) -> Self {
        Self::Format { path: path.into(), reason: reason.into() }
    }

    /// An [`Error::Invalid`].
    pub fn invalid(reason: impl Into<String>) -> Self {
        Self::Invalid { reason: reason.into() }
    }
}

impl From<Error> for io::Error {
    /// Of the kind of the system's error, if it is one.
    fn from(error: Error) -> Self {
        let kind = error.io_error().map_or(io::ErrorKind::Other, io::Error::kind);
        Self::new(kind, error)
    }
}

fn at(offset: Option<u64>) -> String {
    offset.map(|o| format!(" at offset {o}")).unwrap_or_default()
}

/// Which tensors a damaged range holds.
fn which_holds(tensors: &[String]) -> String {
    match tensors {
        [] => String::new(),
        tensors => format!(", in {}", tensors_named(tensors)),
    }
}

/// `tensor "a"`, or `tensors "a", "b"`.
pub(crate) fn tensors_named(tensors: &[String]) -> String {
    let quoted: Vec<String> = tensors.iter().map(|name| format!("{name:?}")).collect();
    let plural = if tensors.len() == 1 { "" } else { "s" };
    format!("tensor{plural} {}", some_of(&quoted))
}

fn key_mismatch(
    path: &Path,
    missing: &[String],
    unexpected: &[String],
    mismatched: &[String],
) -> String {
    let mut text = format!("{} does not have the requested tensors", path.display());
    let mut list = |title: &str, names: &[String]| {
        if !names.is_empty() {
            text.push_str(&format!("; {title} ({}): {}", names.len(), some_of(names)));
        }
    };
    list("not in the checkpoint", missing);
    list("only in the checkpoint", unexpected);
    list("different", mismatched);
    text
}

/// Most names or numbers that a message lists; it counts the rest.
const SHOWN_MAX: usize = 20;

/// The first names, and how many more there are, so that a message stays readable.
pub(crate) fn some_of(names: &[String]) -> String {
    let mut text = names.iter().take(SHOWN_MAX).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN_MAX {
        text.push_str(&format!(", and {} more", names.len() - SHOWN_MAX));
    }
    text
}

/// `rank 3`, or `ranks 1, 3, 5`.
pub(crate) fn numbered(noun: &str, numbers: &[u32]) -> String {
    let shown: Vec<String> = numbers.iter().take(SHOWN_MAX).map(u32::to_string).collect();
    let more = match numbers.len() {
        n if n > SHOWN_MAX => format!(" and {} more", n - SHOWN_MAX),
        _ => String::new(),
    };
    let plural = if numbers.len() == 1 { "" } else { "s" };
    format!("{noun}{plural} {}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    /// Prints an error as anyhow, eyre and others do.
    fn chain(error: &dyn std::error::Error) -> String {
        let rest = error.source().map(|source| format!(": {}", chain(source)));
        format!("{error}{}", rest.unwrap_or_default())
    }

    #[test]
    fn printed_chain_has_the_cause_once() {
        let full = || io::Error::from_raw_os_error(nix::libc::ENOSPC);
        let not_durable = Error::NotDurable { path: "a".into(), cause: full() };
        for error in [Error::io("writing", "a", full()), not_durable] {
            assert_eq!(chain(&error).matches("os error 28").count(), 1, "{}", chain(&error));
            assert!(error.source().is_none());
            let cause = error.io_error().expect("the cause is kept");
            assert_eq!(cause.raw_os_error(), Some(nix::libc::ENOSPC));
        }
    }
}
