//! Follows programs while they run.

use crate::journal::{Journal, Mode};
use crate::live::Live;
use crate::state::State;
use fastrand::Rng;
use ringstow::internals::sys::seam::{Call, Outcome, Watch, in_process};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Follows what all programs of this process do to some directories. Its clones follow the same.
#[derive(Clone)]
pub struct Recorder {
    live: Arc<Mutex<Live>>,
}

impl Recorder {
    /// For these directories. All that is in them now is durable. Each counts as a disk of its own.
    ///
    /// # Panics
    /// If one cannot be listed or read, as also later.
    pub fn new(roots: &[PathBuf]) -> Self {
        Self { live: Arc::new(Mutex::new(Live::new(roots))) }
    }

    /// Watches all calls of the process until the watch is dropped. `decide` is that of [`in_process`].
    pub fn watch(
        &self,
        mut decide: impl FnMut(u64, Call, &Path) -> Outcome + Send + 'static,
    ) -> Watch {
        let recorder = self.clone();
        in_process(move |number, call, path| {
            let outcome = decide(number, call, path);
            if outcome == Outcome::Pass {
                recorder.before(call, path);
            }
            outcome
        })
    }

    /// Looks at the directories before a call that will be made. For a watch of one's own, in place of
    /// [`Recorder::watch`].
    pub fn before(&self, call: Call, path: &Path) {
        self.live().before(call, path);
    }

    /// A moment between two calls, such as the one at which a save returned.
    pub fn moment(&self) -> usize {
        self.live().moment()
    }

    /// A random one of the contents that the disk may have if the power goes now.
    pub fn crash(&self, mode: Mode, rng: &mut Rng) -> State {
        let mut live = self.live();
        let now = live.moment();
        live.journal.state(now, mode, rng)
    }

    /// All that was done so far.
    pub fn journal(&self) -> Journal {
        let mut live = self.live();
        live.moment();
        live.journal.clone()
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
