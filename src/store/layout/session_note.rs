//! The note that the coordinator of a save by several ranks leaves in the directory: `manifest.json.part` holds
//! it until the manifest itself is written there.

use crate::error::{Error, Result, numbered};
use crate::format::{RANKS_MAX, names};
use crate::sys::file::{self, read_start};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::io;
use std::path::Path;

/// Who is to write.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::store) struct Note {
    /// Ranks that take part.
    pub world_size: u32,
    /// The session's own id.
    pub session: Option<String>,
    /// The generation in the shards' names.
    pub generation: Option<u64>,
}

/// Longer files are not notes.
const NOTE_BYTES_MAX: u64 = 1024;

impl Note {
    /// Reads the note in `dir`; `None` if there is no note.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(names::UNCOMMITTED_MANIFEST);
        match read_start(&path, NOTE_BYTES_MAX) {
            Ok(text) => Ok(serde_json::from_slice(&text).ok()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io("reading", path, e)),
        }
    }
}

/// Tells the other ranks of the save in progress in `dir` to stop writing: this one has failed, or was cancelled, and will
/// not try again. If none is in progress, nobody waits.
pub fn give_up(dir: &Path, rank: u32, why: &str) {
    let give_up = || match Note::read(dir)?.and_then(|note| note.session) {
        Some(session) => {
            let told = format!("rank {rank}: {why}");
            file::write(&dir.join(names::given_up(&session)), told.as_bytes())
        }
        None => Ok(()),
    };
    if let Err(error) = give_up() {
        tracing::debug!(%error, "the other ranks write to the end");
    }
}

/// Why a rank has given up the save in progress in `dir`; `None` if none has, as far as this host sees.
pub fn given_up(dir: &Path) -> Option<String> {
    let session = Note::read(dir).ok()??.session?;
    let why = read_start(&dir.join(names::given_up(&session)), NOTE_BYTES_MAX).ok()?;
    Some(String::from_utf8_lossy(&why).into_owned())
}

/// Whether a note, a rank's mark or its giving up is of this session.
pub(in crate::store) fn is_of_session(path: &Path, session: &str) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let content = || read_start(path, NOTE_BYTES_MAX).unwrap_or_default();
    match names::done_rank(name) {
        _ if names::given_up_session(name).is_some_and(|of| of == session) => true,
        Some(_) => content().split(|byte| *byte == b' ').any(|word| word == session.as_bytes()),
        None if name == names::UNCOMMITTED_MANIFEST => serde_json::from_slice(&content())
            .is_ok_and(|note: Note| note.session.as_deref() == Some(session)),
        None => false,
    }
}

/// Says which ranks have not finished writing, for a directory whose files are `names`. `None` if no save by
/// several ranks has begun there.
pub(in crate::store) fn unfinished_ranks(dir: &Path, names: &[String]) -> Option<String> {
    let note = Note::read(dir).ok()??;
    let ranks = note.world_size;
    if ranks > RANKS_MAX {
        return None; // ringstow never writes such a note
    }
    let done: HashSet<u32> = names.iter().filter_map(|name| names::done_rank(name)).collect();
    let missing = missing_ranks(ranks, &done);
    Some(match missing.len() {
        0 => format!("all {ranks} ranks had written their shares, the commit was not reached"),
        _ => format!("of {ranks} ranks, {} had not finished writing", numbered("rank", &missing)),
    })
}

/// The ranks of a world that are not in `present`.
pub(in crate::store) fn missing_ranks(world_size: u32, present: &HashSet<u32>) -> Vec<u32> {
    (0..world_size).filter(|rank| !present.contains(rank)).collect()
}
