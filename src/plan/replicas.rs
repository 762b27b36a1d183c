//! Which of several ranks with the same elements writes which of them. All ranks compute it alike, from what each knows by
//! itself, so they need no message.

use std::ops::Range;

/// A share is about this large: smaller tensors have one writer.
pub const SHARE_BYTES: u64 = 4 << 20;

/// One of several ranks that hold the same elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replica {
    /// Its number among them, from 0 on.
    pub number: u32,
    /// How many there are.
    pub count: u32,
}

/// The rows (of the slowest dimension) that a replica writes of a tensor of that name and size. Over all replicas, every
/// row has one writer. A hash of the name says who writes the first, so that many small tensors spread over all replicas,
/// whichever other tensors a rank has.
pub fn rows_of(name: &str, nbytes: u64, rows: u64, replica: Replica) -> Option<Range<u64>> {
    let shares = (nbytes / SHARE_BYTES).min(replica.count.into()).min(rows).max(1);
    let first = u64::from(crc32fast::hash(name.as_bytes())) % u64::from(replica.count.max(1));
    let count = u64::from(replica.count.max(1));
    let share = (u64::from(replica.number) + count - first) % count;
    (share < shares).then(|| rows * share / shares..rows * (share + 1) / shares)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_row_has_one_writer(name in "[a-z.]{0,9}", nbytes in 0..100u64 << 20, rows in 0..9000u64, count in 1..70u32) {
            let mut written: Vec<_> = (0..count)
                .filter_map(|number| rows_of(&name, nbytes, rows, Replica { number, count }))
                .collect();
            written.sort_by_key(|rows| (rows.start, rows.end));
            prop_assert_eq!(written.first().map(|rows| rows.start), Some(0));
            prop_assert_eq!(written.last().map(|one| one.end), Some(rows));
            prop_assert!(written.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert!(rows == 0 || written.iter().all(|rows| !rows.is_empty()));
        }
    }

    #[test]
    fn replicas_share_the_bytes_evenly() {
        let mut bytes = [0u64; 8];
        for tensor in 0..4000u64 {
            let (name, rows) = (format!("layers.{tensor}.weight"), 64);
            let nbytes = if tensor % 100 == 0 { 64 << 20 } else { rows << 10 };
            for (number, bytes) in bytes.iter_mut().enumerate() {
                let replica = Replica { number: number as u32, count: 8 };
                let share = rows_of(&name, nbytes, rows, replica).map_or(0, |r| r.end - r.start);
                *bytes += nbytes / rows * share;
            }
        }
        let (least, most) = (bytes.iter().min().unwrap(), bytes.iter().max().unwrap());
        assert!((*most as f64) < 1.05 * *least as f64, "{bytes:?}");
    }
}
