//! What must be on the disks after a cut.

use crate::common::{assert_no_litter_in, errno, load_opened, names_in, step_with};
use crate::operations::{Machine, OPERATIONS, Operation, clear, save, state};
use nix::libc;
use ringstow::{Error, OpenOptions, Status, Wanted};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The directories of checkpoints, and what was reported of them.
pub struct Saved {
    root: PathBuf,
    /// The second disk.
    pub second: PathBuf,
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    /// The last steps that were reported as saved.
    steps: BTreeMap<Operation, i64>,
    under_way: Option<Operation>,
}

impl Saved {
    pub fn new(root: PathBuf, second: PathBuf) -> Self {
        for operation in OPERATIONS {
            std::fs::create_dir(root.join(format!("{operation:?}"))).unwrap();
        }
        std::fs::File::open(&root).unwrap().sync_all().unwrap();
        Self { root, second, told: Mutex::default() }
    }

    pub fn under_way(&self) -> Option<Operation> {
        self.told.lock().unwrap().under_way
    }

    fn reported(&self, of: Operation) -> i64 {
        self.told.lock().unwrap().steps.get(&of).copied().unwrap_or(0)
    }

    fn report(&self, of: Operation, step: i64) {
        self.told.lock().unwrap().steps.insert(of, step);
    }

    fn root(&self, of: Operation) -> PathBuf {
        self.root.join(format!("{of:?}"))
    }

    /// Where a step is saved.
    fn path(&self, of: Operation, step: i64) -> PathBuf {
        match of {
            Operation::New | Operation::Recycled | Operation::Remove => {
                self.root(of).join(format!("step-{step}"))
            }
            Operation::Export => self.root(of).join(format!("model-{step}")),
            _ => self.root(of).join("checkpoint"),
        }
    }

    /// Saves the operation's next step.
    pub fn run(&self, machine: &Machine, of: Operation) -> ringstow::Result<()> {
        self.told.lock().unwrap().under_way = Some(of);
        let step = self.reported(of) + 1;
        let to = self.path(of, step);
        if of == Operation::Export && step > 2 {
            let _ = std::fs::remove_dir_all(self.path(of, step - 2)); // there is not room for all
        }
        save(machine, of, step, &to)?;
        if of != Operation::Remove {
            self.report(of, step);
        }
        clear(of, &self.root(of), &to)?;
        self.report(of, step);
        Ok(())
    }

    /// Reports the operation's next step, whatever `write` does for it.
    pub fn pretend(&self, of: Operation, write: impl FnOnce(i64, &Path)) {
        let step = self.reported(of) + 1;
        write(step, &self.path(of, step));
        self.report(of, step);
    }

    /// The step that is committed, of which every byte is right.
    fn found(&self, machine: &Machine, of: Operation, what: &str) -> Option<i64> {
        let store = machine.store(of);
        for found in store.list(self.root(of)).unwrap() {
            if found.status == Status::Committed {
                let step = step_with(store.config(), &found.path);
                state(step).assert_at(machine.of(of), &found.path);
            }
        }
        let path = match of {
            Operation::New | Operation::Recycled | Operation::Remove => {
                store.latest(self.root(of), &Wanted::default()).unwrap()?
            }
            _ => self.path(of, 0),
        };
        match OpenOptions::of(store.config()).open(&path) {
            Ok(_) => Some(step_with(store.config(), &path)),
            Err(error) if is_absent(&error) => None,
            Err(error) => panic!("{what}: {error}"),
        }
    }

    /// Every operation left the step that it reported, or, if the power was cut in it, the next. Says whether it is
    /// the next.
    pub fn check(&self, machine: &Machine, what: &str) -> bool {
        let mut is_next = self.check_exports(machine, what);
        for of in OPERATIONS.into_iter().filter(|of| *of != Operation::Export) {
            let (reported, found) = (self.reported(of), self.found(machine, of, what));
            let last = match of {
                Operation::Remove => None,
                _ => (reported > 0).then_some(reported),
            };
            let next = (self.under_way() == Some(of)).then_some(reported + 1);
            assert!(
                found == last || (found.is_some() && found == next),
                "{what}: {of:?} reported step {reported}, and {found:?} is there"
            );
            is_next |= found.is_some() && found == next;
            if let (Some(found), false) = (found, of == Operation::Remove) {
                self.report(of, found);
            }
        }
        is_next
    }

    /// Reported models load; one that was cut loads, or is refused and can be written again.
    fn check_exports(&self, machine: &Machine, what: &str) -> bool {
        let reported = self.reported(Operation::Export);
        if reported > 0 {
            assert_model(machine, &self.path(Operation::Export, reported), reported, what);
        }
        let next = self.path(Operation::Export, reported + 1);
        match OpenOptions::new().foreign(true).open(&next) {
            Ok(_) => {
                assert_eq!(self.under_way(), Some(Operation::Export), "{what}");
                assert_model(machine, &next, reported + 1, what);
                self.report(Operation::Export, reported + 1);
                true
            }
            Err(error) => {
                // An index without its name lists files that have theirs.
                let is_part = matches!(error, Error::MissingFiles { .. });
                assert!(is_part || is_absent(&error), "{what}: {error}");
                false
            }
        }
    }

    /// After a clean-up nothing is there but committed checkpoints.
    pub fn prune(&self, machine: &Machine, what: &str) {
        for of in OPERATIONS.into_iter().filter(|of| *of != Operation::Export) {
            let store = machine.store(of);
            let swept = store.prune(self.root(of)).unwrap();
            assert!(swept.left.is_empty(), "{what}: {:?}", swept.left);
            for name in names_in(&self.root(of)) {
                let path = self.root(of).join(&name);
                let recycled = name == ".ringstow-spares" && of == Operation::Recycled;
                // An empty directory may be anybody's.
                if !recycled && !names_in(&path).is_empty() {
                    assert_no_litter_in(store.config(), &path);
                }
            }
        }
        let striped = self.path(Operation::Striped, 0).exists();
        let known = |name: &String| (name == "checkpoint" && striped) || name == "lost+found";
        let unknown: Vec<String> =
            names_in(&self.second).into_iter().filter(|name| !known(name)).collect();
        assert!(unknown.is_empty(), "{what}: {unknown:?} on the second disk");
    }
}

/// Whether nothing was committed. A committed checkpoint that lacks files is a broken promise.
fn is_absent(error: &Error) -> bool {
    matches!(error, Error::NoCheckpoint { .. } | Error::NotCommitted { .. })
        || errno(error) == Some(libc::ENOENT)
}

fn assert_model(machine: &Machine, path: &Path, step: i64, what: &str) {
    let model =
        OpenOptions::new().foreign(true).open(path).unwrap_or_else(|e| panic!("{what}: {e}"));
    let loaded = load_opened(&machine.plain, &model).unwrap();
    assert_eq!(state(step).difference(&loaded), None, "{what}");
}
