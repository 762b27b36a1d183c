//! The sign of life of a manager whose run is on a file system that other hosts may use. A lock may not reach these, and a
//! server may keep the lock of a host that is gone.
//!
//! The rule: who holds a run writes its note anew every [`Pace::beat`]. Who wants the run watches the note. If it changes,
//! its writer lives; if it stays the same for [`Pace::silence`], the run is free. No host's clock is compared with another's.
//! Who finds another's note in place of its own, as after a halt of the whole process, has lost the run.

use crate::error::{Error, Result};
use crate::sys::chance::{now_unix_ms, random};
use crate::sys::file_system::host_name;
use crate::sys::{dir, file};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Every note has this length, so that a shorter one leaves nothing of a longer one.
const NOTE_BYTES: usize = 1024;

/// How often a manager gives a sign of life, and how long others wait for one.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Between two notes.
    pub beat: Duration,
    /// After so long without a new note, its writer counts as dead. Many times `beat`: a disk may be slow.
    pub silence: Duration,
    /// How long a server may keep the lock of a host that is gone.
    pub lease: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            beat: Duration::from_secs(10),
            silence: Duration::from_secs(60),
            lease: Duration::from_secs(150),
        }
    }
}

/// What the holder of a run notes in the run's lock file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Note {
    pub host: String,
    pub process: u32,
    pub since_unix_ms: u64,
    /// The kernel that runs the process, and its mount: a lock there keeps out all that have the same.
    #[serde(default)]
    pub kernel: String,
    /// No other holder has the same number.
    #[serde(default)]
    pub id: u64,
    #[serde(default)]
    pub beats: u64,
}

impl Note {
    /// This process's note on a run whose directory has this [`kernel`].
    pub fn own(kernel: String) -> Self {
        Self {
            host: host_name(),
            process: std::process::id(),
            since_unix_ms: now_unix_ms(),
            kernel,
            id: random(),
            beats: 0,
        }
    }

    /// The note in a run's lock file, if there is one.
    pub fn read(path: &Path) -> Option<Self> {
        let bytes = file::read_start(path, NOTE_BYTES as u64).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Whether its writer is one that a lock would show to this process.
    pub fn is_of(&self, kernel: &str) -> bool {
        self.kernel == kernel
    }

    /// Writes it in place of what is there.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let text = format!("{:<NOTE_BYTES$}", serde_json::json!(self).to_string());
        let opened = match file::open_write(path, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => file::create_new(path, false),
            opened => opened,
        };
        file::write_at(&opened?, path, text.as_bytes(), 0)
    }
}

impl fmt::Display for Note {
    /// `process 7 on node-3, since 1 h 5 min 9 s`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = now_unix_ms().saturating_sub(self.since_unix_ms) / 1000;
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        let Self { process, host, .. } = self;
        write!(f, "process {process} on {host}, since {hours} h {minutes} min {} s", seconds % 60)
    }
}

/// What identifies this run of the machine's kernel, and the mount of a path.
pub(super) fn kernel(root: &Path) -> String {
    let boot = file::boot_id().unwrap_or_default();
    format!("{boot} {}", dir::device(root).unwrap_or_default())
}

/// What a watched note says of its writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sign {
    Alive,
    Unknown,
    Silent,
}

/// Watches a note for a sign of life.
#[derive(Debug, Default)]
pub(super) struct Watch {
    first: Option<(Note, Instant)>,
}

impl Watch {
    /// What is known by now. A note of another holder than the first one's is a sign of life, too.
    pub fn see(&mut self, note: &Note, now: Instant, pace: &Pace) -> Sign {
        let (first, since) = self.first.get_or_insert_with(|| (note.clone(), now));
        match now.duration_since(*since) {
            _ if (first.id, first.beats) != (note.id, note.beats) => Sign::Alive,
            watched if watched >= pace.silence => Sign::Silent,
            _ => Sign::Unknown,
        }
    }
}

/// Gives signs of life until it is dropped, or another has taken the run.
#[derive(Debug)]
pub(super) struct Heartbeat(Arc<Beats>);

#[derive(Debug)]
struct Beats {
    path: PathBuf,
    state: Mutex<State>,
    ends: Condvar,
}

#[derive(Debug)]
struct State {
    note: Note,
    is_over: bool,
    /// Who has taken the run.
    lost_to: Option<String>,
}

impl Heartbeat {
    /// Writes the first note, and the others from a thread of its own.
    pub fn start(path: &Path, note: Note, pace: &Pace) -> Result<Self> {
        note.write(path).map_err(|error| Error::io("writing", path, error))?;
        let state = Mutex::new(State { note, is_over: false, lost_to: None });
        let beats = Arc::new(Beats { path: path.into(), state, ends: Condvar::new() });
        let (of_thread, every) = (beats.clone(), pace.beat);
        std::thread::Builder::new()
            .name("ringstow-run".into())
            .spawn(move || of_thread.beat(every))
            .map_err(|error| Error::io("starting a thread for", path, error))?;
        Ok(Self(beats))
    }

    /// Checks that no other manager has taken the run.
    ///
    /// # Errors
    /// [`Error::RunBusy`].
    pub fn check(&self, root: &Path) -> Result<()> {
        let mut state = self.0.state();
        state.look(&self.0.path);
        match &state.lost_to {
            None => Ok(()),
            Some(holder) => Err(Error::RunBusy { path: root.into(), holder: holder.clone() }),
        }
    }

    /// Ends it. Returns whether the note is still this process's.
    pub fn end(self) -> bool {
        let mut state = self.0.state();
        state.look(&self.0.path);
        state.lost_to.is_none()
    }
}

impl Drop for Heartbeat {
    /// Waits for a note that is being written.
    fn drop(&mut self) {
        self.0.state().is_over = true;
        self.0.ends.notify_all();
    }
}

impl Beats {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beat(&self, every: Duration) {
        let mut state = self.state();
        loop {
            let waited = self.ends.wait_timeout_while(state, every, |state| !state.is_over);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !state.is_over {
                state.look(&self.path);
            }
            if state.is_over || state.lost_to.is_some() {
                return;
            }
            state.note.beats += 1;
            if let Err(error) = state.note.write(&self.path) {
                tracing::warn!(%error, "cannot show other hosts that this process saves: {}", self.path.display());
            }
        }
    }
}

impl State {
    fn look(&mut self, path: &Path) {
        if self.lost_to.is_none()
            && let Some(other) = Note::read(path).filter(|found| found.id != self.note.id)
        {
            let holder = format!(
                "{other}, which has taken it over: for a while it had no sign of life from this process"
            );
            tracing::error!(
                "{} is saved into by {holder}",
                path.parent().unwrap_or(path).display()
            );
            self.lost_to = Some(holder);
        }
    }
}
