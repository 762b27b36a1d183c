//! Whether regions cover an array: each element exactly once.

use std::hash::{BuildHasher, RandomState};

/// A region: its offsets and its sizes, one number per dimension.
pub type Extent<'a> = (&'a [u64], &'a [u64]);

/// Whether a region has as many dimensions as `shape` and lies within it.
pub fn within(shape: &[u64], (offsets, sizes): Extent) -> bool {
    offsets.len() == shape.len()
        && sizes.len() == shape.len()
        && (0..shape.len())
            .all(|d| offsets[d].checked_add(sizes[d]).is_some_and(|end| end <= shape[d]))
}

/// Whether `regions`, which lie within `shape`, hold each of its elements exactly once.
///
/// Takes linear time and no memory, whatever the arrangement of the regions. The number of regions that hold an element
/// changes only at the regions' corners. So if each corner counts as plus or minus one, those of the regions must cancel
/// those of the whole array. The corners are not listed: a region has 2^d of them. Each coordinate stands for a random
/// number, a corner for the product of its coordinates, and a region for the sum over its corners, which is the product
/// over its dimensions of last minus first. Two sums that differ are equal by chance with a probability below 2^-50.
pub fn tiles(shape: &[u64], regions: &[Extent]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let split = split_dims(shape, regions);
    let random = RandomState::new();
    let corners = |(offsets, sizes): Extent| {
        let number = |d: usize, at: u64| random.hash_one((d, at)) % PRIME;
        split.iter().fold(1, |product, &d| {
            let width = number(d, offsets[d] + sizes[d]) + PRIME - number(d, offsets[d]);
            modulo(u128::from(product) * u128::from(width))
        })
    };
    let sum = |sum: u64, &region: &Extent| modulo(u128::from(sum) + u128::from(corners(region)));
    let zeros = vec![0; shape.len()];
    regions.iter().fold(0, sum) == modulo(corners((&zeros, shape)).into())
}

/// A prime just below 2^61.
const PRIME: u64 = (1 << 61) - 1;

/// The remainder of a number below 2^124: what is above 61 bits counts as often as the prime fits, once each.
fn modulo(number: u128) -> u64 {
    let folded = (number as u64 & PRIME) + (number >> 61) as u64;
    let folded = (folded & PRIME) + (folded >> 61);
    if folded >= PRIME { folded - PRIME } else { folded }
}

/// Most dimensions along which an array with holes is split.
const SPLIT_MAX: usize = 16;

/// A region that none holds: where it starts, and its extent.
pub type Hole = (Vec<u64>, Vec<u64>);

/// What regions leave out of an array, and whether they hold anything twice.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Regions that fill what none holds, each element once: where each starts, and its extent.
    pub holes: Vec<Hole>,
    /// Whether two regions hold the same element.
    pub overlap: bool,
}

/// Surveys `regions`, which lie within `shape`.
///
/// # Errors
/// Those of [`overlap`].
pub fn survey(shape: &[u64], regions: &[Extent]) -> Result<Survey, String> {
    let mut holes = Vec::new();
    let overlap = sweep(shape, regions, &mut |hole| holes.push(hole.clone()))?;
    Ok(Survey { holes, overlap })
}

/// Whether two of the regions, which lie within `shape`, hold the same element.
///
/// Cuts the array along one dimension after the other where regions begin or end. This takes n log n time for grids
/// of any number of dimensions, and longer for regions that cross each other.
///
/// # Errors
/// The reason for giving up: too many regions that cross each other, or too many dimensions.
pub fn overlap(shape: &[u64], regions: &[Extent]) -> Result<bool, String> {
    sweep(shape, regions, &mut |_| {})
}

fn sweep(shape: &[u64], regions: &[Extent], hole: &mut dyn FnMut(&Hole)) -> Result<bool, String> {
    const STEPS_MIN: usize = 1 << 16;
    const STEPS_PER_REGION: usize = 64;
    const LISTED_MIN: usize = 1 << 12;
    const LISTED_PER_REGION: usize = 2;
    if shape.contains(&0) {
        return Ok(false);
    }
    let split = split_dims(shape, regions);
    let mut present: Vec<u32> =
        (0..).zip(regions).filter(|(_, (_, sizes))| !sizes.contains(&0)).map(|(n, _)| n).collect();
    let mut sweep = Sweep {
        regions,
        steps_left: STEPS_MIN + STEPS_PER_REGION * regions.len(),
        listed_left: LISTED_MIN + LISTED_PER_REGION * regions.len(),
        at: (vec![0; shape.len()], shape.to_vec()),
        overlap: false,
        hole,
    };
    if split.len() > SPLIT_MAX || sweep.cut(&split, &mut present).is_none() {
        return Err(too_many(regions.len(), split.len()));
    }
    Ok(sweep.overlap)
}

/// The dimensions that some region does not reach through. Empty regions count if that costs nothing.
fn split_dims(shape: &[u64], regions: &[Extent]) -> Vec<usize> {
    let is_split = |d: &usize| regions.iter().any(|(o, s)| o[*d] > 0 || s[*d] < shape[*d]);
    (0..shape.len()).filter(is_split).collect()
}

fn too_many(regions: usize, split: usize) -> String {
    format!(
        "{regions} chunks are split along {split} dimensions, which is more than can be checked"
    )
}

/// A survey in progress.
struct Sweep<'a> {
    regions: &'a [Extent<'a>],
    /// Regions that the sweep may still visit.
    steps_left: usize,
    /// Regions that its lists may still hold: 32 bytes each.
    listed_left: usize,
    /// The current piece of the array.
    at: Hole,
    overlap: bool,
    /// Takes each hole.
    hole: &'a mut dyn FnMut(&Hole),
}

impl Sweep<'_> {
    /// Surveys the current piece. `present` are the regions that reach into it; except along `split`, each reaches
    /// through all of it. `None` if that takes too many steps, or too much memory.
    fn cut(&mut self, split: &[usize], present: &mut [u32]) -> Option<()> {
        if present.is_empty() {
            (self.hole)(&self.at);
            return Some(());
        }
        let Some((&d, split)) = split.split_first() else {
            self.overlap |= present.len() > 1;
            return Some(());
        };
        self.listed_left = self.listed_left.checked_sub(present.len())?;
        let regions = self.regions;
        let begin = |number: u32| regions[number as usize].0[d];
        let end = |number: u32| begin(number) + regions[number as usize].1[d];
        let (offset, size) = (self.at.0[d], self.at.1[d]);
        let mut cuts = Vec::with_capacity(2 * present.len() + 2);
        cuts.extend(present.iter().flat_map(|&n| [begin(n), end(n)]));
        cuts.extend([offset, offset + size]);
        cuts.sort_unstable();
        cuts.dedup();
        present.sort_unstable_by_key(|&n| begin(n));
        let (mut coming, mut here) = (present.iter().copied().peekable(), Vec::new());
        for cut in cuts.windows(2) {
            here.retain(|&n| end(n) > cut[0]);
            here.extend(std::iter::from_fn(|| coming.next_if(|&n| begin(n) == cut[0])));
            self.steps_left = self.steps_left.checked_sub(here.len() + 1)?;
            (self.at.0[d], self.at.1[d]) = (cut[0], cut[1] - cut[0]);
            self.cut(split, &mut here)?;
        }
        (self.at.0[d], self.at.1[d]) = (offset, size);
        self.listed_left += present.len();
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Owned = (Vec<u64>, Vec<u64>);

    fn lend(regions: &[Owned]) -> Vec<Extent<'_>> {
        regions.iter().map(|(o, s)| (o.as_slice(), s.as_slice())).collect()
    }

    /// How often each element is held, one by one.
    fn counts(shape: &[u64], regions: &[Owned]) -> Vec<usize> {
        let elements = shape.iter().product::<u64>();
        let at = |mut n: u64| {
            let mut at = vec![0; shape.len()];
            for d in (0..shape.len()).rev() {
                at[d] = n % shape[d];
                n /= shape[d];
            }
            at
        };
        let holds = |(o, s): &&Owned, at: &[u64]| {
            at.iter().enumerate().all(|(d, &x)| (o[d]..o[d] + s[d]).contains(&x))
        };
        (0..elements).map(|n| regions.iter().filter(|b| holds(b, &at(n))).count()).collect()
    }

    /// Splits a region in two again and again, at the offsets in `choices`.
    fn split(shape: &[u64], choices: &[(usize, usize, u64)]) -> Vec<Owned> {
        let mut regions = vec![(vec![0; shape.len()], shape.to_vec())];
        for &(which, d, at) in choices {
            let (which, d) = (which % regions.len(), d % shape.len());
            let (mut offsets, mut sizes) = regions[which].clone();
            let at = at % (sizes[d] + 1);
            regions[which].1[d] = at;
            offsets[d] += at;
            sizes[d] -= at;
            regions.push((offsets, sizes));
        }
        regions
    }

    proptest! {
        #[test]
        fn regions_tile_an_array_if_each_element_is_held_once(
            shape in prop::collection::vec(1..6u64, 1..4),
            choices in prop::collection::vec((any::<usize>(), any::<usize>(), any::<u64>()), 0..8),
            moved in prop::option::of((any::<usize>(), any::<usize>(), any::<u64>())),
        ) {
            let mut regions = split(&shape, &choices);
            if let Some((which, d, by)) = moved {
                let (which, d) = (which % regions.len(), d % shape.len());
                let (offsets, sizes) = &mut regions[which];
                offsets[d] = by % (shape[d] - sizes[d] + 1);
            }
            let counts = counts(&shape, &regions);
            let tiled = tiles(&shape, &lend(&regions));
            prop_assert_eq!(tiled, counts.iter().all(|&n| n == 1));
            let Survey { holes, overlap } = survey(&shape, &lend(&regions)).unwrap();
            prop_assert_eq!(overlap, counts.iter().any(|&n| n > 1));
            regions.extend(holes);
            let filled = super::tests::counts(&shape, &regions);
            prop_assert!(counts.iter().zip(filled).all(|(&before, now)| now == before.max(1)));
        }
    }

    #[test]
    fn overlap_of_the_same_size_does_not_hide_a_hole() {
        let regions = [(vec![0, 0], vec![2, 2]), (vec![1, 0], vec![2, 2])];
        assert!(!tiles(&[4, 2], &lend(&regions)));
        let holes = vec![(vec![3, 0], vec![1, 2])];
        assert_eq!(survey(&[4, 2], &lend(&regions)), Ok(Survey { holes, overlap: true }));
    }

    #[test]
    fn pinwheel_without_a_straight_cut_tiles() {
        let regions = [
            (vec![0, 0], vec![1, 2]),
            (vec![0, 2], vec![2, 1]),
            (vec![2, 1], vec![1, 2]),
            (vec![1, 0], vec![2, 1]),
            (vec![1, 1], vec![1, 1]),
        ];
        assert!(tiles(&[3, 3], &lend(&regions)));
    }

    #[test]
    fn regions_split_along_many_dimensions_take_little_memory() {
        // Listed, their corners would take 16 TB.
        let regions = |n: u64| -> Vec<Owned> {
            (0..n).map(|i| ([i].into_iter().chain([0; 31]).collect(), vec![1; 32])).collect()
        };
        let mut shape = [1; 32];
        shape[0] = 500;
        let all = regions(500);
        let (lent, mut wide) = (lend(&all), [2; 32]);
        wide[0] = 500;
        let most = allocation_counter::measure(|| {
            assert!(tiles(&shape, &lent));
            assert!(!tiles(&shape, &lent[1..]));
            assert!(!tiles(&wide, &lent));
            assert!(survey(&wide, &lent).unwrap_err().contains("32 dimensions"));
        });
        assert!(most.bytes_max < 1 << 16, "{} bytes", most.bytes_max);
    }

    #[test]
    fn survey_of_regions_in_one_corner_takes_little_memory() {
        // Each dimension leaves all of them in one piece.
        let mut shape = [2; 16];
        shape[15] = 5000;
        let regions: Vec<Owned> =
            (0..5000).map(|i| ([0; 15].into_iter().chain([i]).collect(), vec![1; 16])).collect();
        let lent = lend(&regions);
        let most = allocation_counter::measure(|| {
            assert!(overlap(&shape, &lent).unwrap_err().contains("more than can be checked"));
        });
        assert!(most.bytes_max < (128 << 12) + 64 * 5000, "{} bytes", most.bytes_max);
    }

    #[test]
    fn survey_gives_up_on_crossing_regions_and_not_on_grids() {
        let crossed: Vec<Owned> = (0..4000)
            .flat_map(|i| [(vec![2 * i, 0], vec![1, 8000]), (vec![0, 2 * i], vec![8000, 1])])
            .collect();
        assert!(survey(&[8000, 8000], &lend(&crossed)).unwrap_err().contains("8000 chunks"));
        let grid: Vec<Owned> = (0..32 * 32 * 32)
            .map(|i| (vec![2 * (i / 1024), 2 * (i / 32 % 32), 2 * (i % 32)], vec![1; 3]))
            .collect();
        let Survey { holes, overlap } = survey(&[64; 3], &lend(&grid)).unwrap();
        let held: u64 = holes.iter().map(|(_, sizes)| sizes.iter().product::<u64>()).sum();
        assert_eq!((held + (1 << 15), overlap), (1 << 18, false));
        assert!(survey(&[2; 100], &lend(&[(vec![0; 100], vec![1; 100])])).is_err());
        assert_eq!(survey(&[0, 9], &[]), Ok(Survey::default()));
        assert_eq!(super::overlap(&[2, 2], &[]), Ok(false));
    }
}
