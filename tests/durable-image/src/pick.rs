//! Which of the changes that were not durable a disk keeps.

use crate::change::{BLOCK, Change, Inode};
use crate::journal::{Journal, Mode};
use crate::state::State;
use fastrand::Rng;

/// A page of a file: what a system writes at once.
const PAGE: usize = 4096 / BLOCK;

impl Journal {
    /// What the disk may hold at a moment: without and with all that was not durable, with each change of that alone,
    /// with all but each, and as many random parts. No two are the same.
    pub fn states(&self, moment: usize, mode: Mode, random: usize, rng: &mut Rng) -> Vec<State> {
        let durable = self.durable(moment, mode);
        let open: Vec<usize> = self.open(moment, &durable);
        let mut picks = vec![durable.clone(), self.with(&durable, &open)];
        for effects in self.units(&open, rng) {
            let mut only = self.with(&durable, &effects);
            self.close(&mut only, mode);
            let rest = open.iter().copied().filter(|number| !effects.contains(number));
            let mut all_but = self.with(&durable, &rest.collect::<Vec<_>>());
            self.drop_unfounded(&mut all_but, mode);
            picks.extend([only, all_but]);
        }
        picks.extend((0..random).map(|_| self.random(&durable, &open, mode, rng)));
        picks.sort_unstable();
        picks.dedup();
        picks.iter().map(|kept| State::new(self, &open, kept)).collect()
    }

    /// A random one of the contents that the disk may have at a moment.
    pub fn state(&self, moment: usize, mode: Mode, rng: &mut Rng) -> State {
        let durable = self.durable(moment, mode);
        let open = self.open(moment, &durable);
        State::new(self, &open, &self.random(&durable, &open, mode, rng))
    }

    /// The changes that the disk may lose.
    fn open(&self, moment: usize, durable: &[bool]) -> Vec<usize> {
        let is_open = |number: &usize| self.effects[*number].at <= moment && !durable[*number];
        (0..self.effects.len()).filter(is_open).collect()
    }

    fn with(&self, durable: &[bool], more: &[usize]) -> Vec<bool> {
        let mut kept = durable.to_vec();
        more.iter().for_each(|number| kept[*number] = true);
        kept
    }

    /// Changes that are kept or lost together: each change of names, each file's length, its content, and one block of it.
    fn units(&self, open: &[usize], rng: &mut Rng) -> Vec<Vec<usize>> {
        let of = |is_meant: &dyn Fn(&Change) -> bool| -> Vec<usize> {
            let is_meant = |number: &usize| is_meant(&self.effects[*number].change);
            open.iter().copied().filter(is_meant).collect()
        };
        let names = of(&|change| matches!(change, Change::Names(_)));
        let mut units: Vec<Vec<usize>> = names.into_iter().map(|number| vec![number]).collect();
        let mut files: Vec<Inode> =
            open.iter().filter_map(|number| self.effects[*number].change.file()).collect();
        files.sort_unstable();
        files.dedup();
        for of_file in files {
            units.push(of(&|change| matches!(change, Change::Length(file, _) if *file == of_file)));
            let blocks =
                of(&|change| matches!(change, Change::Block(file, _, _) if *file == of_file));
            if let Some(one) = rng.choice(&blocks) {
                units.push(vec![*one]);
            }
            units.push(blocks);
        }
        units.retain(|effects| !effects.is_empty());
        units
    }

    fn random(&self, durable: &[bool], open: &[usize], mode: Mode, rng: &mut Rng) -> Vec<bool> {
        let survives = [0.1, 0.5, 0.9][rng.usize(..3)];
        // A system writes pages, a disk sectors.
        let together = [1, PAGE][rng.usize(..2)];
        let mut kept = durable.to_vec();
        let mut last = None;
        for &number in open {
            let page = match self.effects[number].change {
                Change::Block(file, at, _) => Some((file, at / together, self.effects[number].at)),
                _ => None,
            };
            let is_kept = match last {
                Some((before, is_kept)) if page.is_some() && before == page => is_kept,
                _ => rng.f64() < survives,
            };
            (kept[number], last) = (is_kept, Some((page, is_kept)));
        }
        if rng.bool() {
            self.close(&mut kept, mode)
        } else {
            self.drop_unfounded(&mut kept, mode)
        }
        kept
    }
}
