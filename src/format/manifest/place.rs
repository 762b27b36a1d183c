//! Where a save stands among the saves of its run: what makes it the newest, whatever the clocks of the hosts say.

use super::Manifest;
use serde::{Deserialize, Serialize, Serializer};
use std::path::Path;

/// What a save of a step notes of its run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The name of the directory that it was saved to. A copy of that directory has another name.
    pub name: String,
    /// Its number among the saves of the run: above those of all that were beside it, and no less than the time of the save
    /// in milliseconds since 1970-01-01 UTC.
    pub sequence: u64,
    /// How often the run had gone back to an earlier step: steps that were saved after that are newer than all before,
    /// whatever their numbers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub branch: u64,
}

impl Place {
    /// Whether a directory has the name that the save gave it, and so is no copy.
    pub fn is_of(&self, dir: &Path) -> bool {
        dir.file_name().is_some_and(|name| *name == *self.name)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The order of the steps of a run: the greater is the newer. What has no [`Place`] is older than what has one, and among
/// its like ordered by number and time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order {
    /// [`Place::branch`].
    pub branch: u64,
    /// The step's number.
    pub step: Option<u64>,
    /// When it was saved.
    pub age: Age,
}

/// The order of saves: the greater was saved later.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Age {
    /// [`Place::sequence`]; 0 without one.
    pub sequence: u64,
    /// When it was committed, by the clock of its host.
    pub created_unix_ms: Option<u64>,
}

/// What all copies of a save have alike, slimmed or not, and no other save of the step has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SaveId {
    /// Which of two saves is the later one.
    pub age: Age,
    block_bytes: u64,
}

impl SaveId {
    /// That of a manifest, or of the part of one that lists its files.
    pub fn of<T, S>(manifest: &Manifest<T, S>) -> Self {
        Self { age: manifest.age(), block_bytes: manifest.block_bytes }
    }
}

/// What the first bytes of a manifest say.
#[derive(Debug, Clone, Deserialize)]
pub struct Head {
    /// When it was committed, in milliseconds since 1970-01-01 UTC.
    pub created_unix_ms: u64,
    /// The step that it was saved as. Absent in manifests that have it at their end.
    #[serde(default)]
    pub step: Option<u64>,
    /// Where it stands among the saves of its run.
    #[serde(default)]
    pub place: Option<Place>,
}

impl Head {
    /// So many bytes have all of it: a file's name has 255 at most.
    pub const BYTES: u64 = 4096;

    /// Reads the start of a manifest. No checksum covers it: callers must tolerate a wrong answer.
    pub fn parse(start: &[u8]) -> Option<Self> {
        const FILES: &[u8] = br#","files":"#; // no text in JSON has such quotation marks
        let at = start.windows(FILES.len()).position(|found| found == FILES)?;
        serde_json::from_slice(&[&start[..at], b"}"].concat()).ok()
    }

    /// When it was saved.
    pub fn age(&self) -> Age {
        Age::of(self.place.as_ref(), Some(self.created_unix_ms))
    }
}

impl Age {
    fn of(place: Option<&Place>, created_unix_ms: Option<u64>) -> Self {
        Self { sequence: place.map_or(0, |place| place.sequence), created_unix_ms }
    }
}

impl<T, S> Manifest<T, S> {
    /// When it was saved.
    pub fn age(&self) -> Age {
        Age::of(self.place.as_ref(), Some(self.created_unix_ms))
    }

    /// Where it stands among the steps of its run, being this step.
    pub fn order(&self, step: Option<u64>) -> Order {
        let branch = self.place.as_ref().map_or(0, |place| place.branch);
        Order { branch, step, age: self.age() }
    }
}

/// An order as four numbers, for JSON.
///
/// # Errors
/// Those of `to`.
pub(crate) fn numbers<S: Serializer>(order: &Order, to: S) -> Result<S::Ok, S::Error> {
    let Order { branch, step, age: Age { sequence, created_unix_ms } } = *order;
    (branch, step.unwrap_or(0), sequence, created_unix_ms.unwrap_or(0)).serialize(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::manifest::tests::sample;

    #[test]
    fn head_is_read_from_the_first_bytes_of_a_manifest() {
        let mut manifest = sample();
        manifest.created_unix_ms = 7;
        let head = |manifest: &Manifest| {
            let bytes = manifest.encode().unwrap();
            Head::parse(&bytes[..bytes.len().min(Head::BYTES as usize)])
        };
        assert_eq!(head(&manifest).unwrap().age(), Age { sequence: 0, created_unix_ms: Some(7) });
        let name = format!("{}\"files\":", "\u{1}".repeat(200));
        (manifest.step, manifest.place) = (Some(9), Some(Place { name, sequence: 3, branch: 1 }));
        let head = head(&manifest).unwrap();
        assert_eq!((head.step, &head.place), (Some(9), &manifest.place));
        assert!(Head::parse(b"{\"format\":\"ringstow\"").is_none());
    }

    #[test]
    fn order_is_by_branch_then_by_number_then_by_sequence_and_last_by_the_clock() {
        let order = |branch, step, sequence, created| Order {
            branch,
            step: Some(step),
            age: Age { sequence, created_unix_ms: Some(created) },
        };
        let rising = [
            order(0, 30, 0, 9000), // saved before there were sequences
            order(0, 31, 1, 7000),
            order(0, 40, 2, 6000),
            order(0, 40, 3, 5000), // of two saves of one number
            order(1, 31, 4, 1),
        ];
        assert!(rising.is_sorted());
    }
}
