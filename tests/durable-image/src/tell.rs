//! Puts into words what a disk lost.

use crate::change::{Change, Inode, Slot};
use crate::journal::Journal;
use crate::state::State;
use std::collections::BTreeMap;
use std::fmt::Write;

impl Journal {
    /// What a disk kept and lost of the changes that were not durable, a line for each.
    pub fn tell(&self, state: &State) -> String {
        let mut text = String::new();
        let mut files: BTreeMap<Inode, [usize; 2]> = BTreeMap::new();
        for &(number, kept) in &state.open {
            let what = match &self.effects[number].change {
                Change::Names(change) => self.name_change(change),
                Change::Length(file, bytes) => {
                    format!("{}: its length of {bytes} bytes", self.nodes[*file].called.display())
                }
                Change::Block(file, ..) => {
                    files.entry(*file).or_default()[usize::from(kept)] += 1;
                    continue;
                }
            };
            let _ = writeln!(text, "  {} {what}", if kept { "kept" } else { "lost" });
        }
        for (file, [lost, kept]) in files {
            let called = self.nodes[file].called.display();
            let _ = writeln!(text, "  {called}: kept {kept} of {} written blocks", lost + kept);
        }
        text
    }

    fn name_change(&self, change: &[(Slot, Option<Inode>)]) -> String {
        let path = |(dir, name): &Slot| self.nodes[*dir].called.join(name).display().to_string();
        match change {
            [(slot, None)] => format!("the removal of {}", path(slot)),
            [(slot, Some(_))] => format!("the creation of {}", path(slot)),
            [(from, None), (to, _)] => format!("the renaming of {} to {}", path(from), path(to)),
            all => {
                let names: Vec<String> = all.iter().map(|(slot, _)| path(slot)).collect();
                format!("the exchange of {}", names.join(" and "))
            }
        }
    }
}
