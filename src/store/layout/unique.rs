//! Names for a save or a write that no other save or write has, on this host and on others.

use crate::sys::chance::random;

/// Sixteen hex digits, different at every call.
pub(in crate::store) fn unique() -> String {
    format!("{:016x}", random())
}

/// A step from one generation to the next, for a file system on which another host may see the same files and save
/// at the same time: both would choose the same number with one step of 1. Large enough that two steps are hardly ever
/// equal, and small enough that a directory never runs out of numbers.
pub(in crate::store) fn random_step() -> u64 {
    const STEP_MAX: u64 = 1 << 32;
    1 + random() % STEP_MAX
}

#[cfg(test)]
mod tests {
    use crate::store::layout::unique::*;
    use std::collections::HashSet;

    #[test]
    fn unique_texts_differ_and_fit_file_names() {
        let all: HashSet<String> = (0..1000).map(|_| unique()).collect();
        assert_eq!(all.len(), 1000);
        let name =
            |write| crate::format::names::uncommitted_write("rank00000-0.safetensors", write);
        assert!(all.iter().all(|write| crate::format::names::split_write(&name(write)).is_some()));
    }
}
