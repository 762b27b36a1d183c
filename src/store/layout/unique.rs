//! Texts that tell one save or write from every other, on this host and on others.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// Sixteen hex digits that nothing else was ever given.
///
/// The keys of [`RandomState`] are random in each thread of a process, and a forked child has its parent's: so
/// process and time count as well.
pub(in crate::store) fn unique() -> String {
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    hasher.write_u128(now.as_nanos());
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use crate::store::layout::unique::*;
    use std::collections::HashSet;

    #[test]
    fn no_two_are_alike_and_each_is_a_name() {
        let all: HashSet<String> = (0..1000).map(|_| unique()).collect();
        assert_eq!(all.len(), 1000);
        let name = |write| crate::format::names::written_part("rank00000-0.safetensors", write);
        assert!(all.iter().all(|write| crate::format::names::written(&name(write)).is_some()));
    }
}
