//! What benches share: time on the CPU, and what many measurements say together.
#![allow(dead_code)] // each of them uses a part of it

use nix::sys::resource::{UsageWho, getrusage};

/// CPU seconds that this process has used, its threads in the kernel among them.
pub fn cpu_seconds() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("asking about oneself is allowed");
    [usage.user_time(), usage.system_time()]
        .iter()
        .map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6)
        .sum()
}

/// Numbers that look random; the same after the same seed.
pub struct Dice(pub u64);

impl Dice {
    /// From 0 to `end - 1`.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) as usize % end
    }

    /// Puts them in any order.
    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for i in (1..all.len()).rev() {
            all.swap(i, self.below(i + 1));
        }
    }
}

/// The value in the middle of at least one.
pub fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    (of[(of.len() - 1) / 2] + of[of.len() / 2]) / 2.0
}

/// The median of ratios and its 95 % interval, by bootstrap: `1.02 (0.99–1.05)`.
pub fn spread(ratios: &[f64]) -> String {
    let mut dice = Dice(1);
    let again = |_| median(ratios.iter().map(|_| ratios[dice.below(ratios.len())]).collect());
    let mut medians: Vec<f64> = (0..2000).map(again).collect();
    medians.sort_by(f64::total_cmp);
    let (low, high) = (medians[50], medians[1949]);
    format!("{:.3} ({low:.3}–{high:.3})", median(ratios.to_vec()))
}
