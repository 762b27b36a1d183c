//! Whether regions cover an array: each element exactly once.

/// A region: its offsets and its sizes, one number per dimension.
pub type Extent<'a> = (&'a [u64], &'a [u64]);

/// Whether a region has as many dimensions as `shape` and lies within it.
pub fn within(shape: &[u64], (offsets, sizes): Extent) -> bool {
    offsets.len() == shape.len()
        && sizes.len() == shape.len()
        && (0..shape.len())
            .all(|d| offsets[d].checked_add(sizes[d]).is_some_and(|end| end <= shape[d]))
}

/// Limits on the dimensions along which an array is split, and on the corners to sort (16 bytes each). A million
/// regions split along four dimensions stay below both.
const SPLIT_MAX: usize = 16;
const CORNERS_MAX: usize = 1 << 25;

/// A region split along more than this many dimensions has far more corners than its description has bytes. Few
/// corners are counted all the same.
const SPLIT_USUAL: usize = 6;
const CORNERS_FEW: usize = 1 << 20;

/// Whether `regions`, which lie within `shape`, hold each of its elements exactly once.
///
/// Takes n log n time in the number of regions, whatever their arrangement. The number of regions that hold an
/// element changes only at the regions' corners. So if each corner counts as plus or minus one, those of the regions
/// must cancel those of the whole array.
///
/// # Errors
/// The reason for giving up: the regions are split along too many dimensions.
pub fn tiles(shape: &[u64], regions: &[Extent]) -> Result<bool, String> {
    if shape.contains(&0) {
        return Ok(true);
    }
    let split = split_dims(shape, regions);
    let corners = (regions.len() + 1).checked_shl(split.len() as u32);
    let corners_max = if split.len() > SPLIT_USUAL { CORNERS_FEW } else { CORNERS_MAX };
    if split.len() > SPLIT_MAX || corners.is_none_or(|n| n > corners_max) {
        return Err(too_many(regions.len(), split.len()));
    }
    let zeros = vec![0; shape.len()];
    let mut steps = Vec::with_capacity(corners.unwrap_or(0));
    push_corners(&mut steps, shape, &split, (&zeros, shape), true);
    for &extent in regions.iter().filter(|(_, sizes)| !sizes.contains(&0)) {
        push_corners(&mut steps, shape, &split, extent, false);
    }
    steps.sort_unstable();
    Ok(steps.chunk_by(|a, b| a >> 1 == b >> 1).all(|same| {
        let minus = same.partition_point(|step| step & 1 == 0);
        minus * 2 == same.len()
    }))
}

/// Pushes each corner of a region as its position in row-major order, with its sign as the last bit.
fn push_corners(steps: &mut Vec<u128>, shape: &[u64], split: &[usize], b: Extent, minus: bool) {
    let first = steps.len();
    steps.push(minus.into());
    for &d in split {
        let radix = u128::from(shape[d]) + 1;
        for i in first..steps.len() {
            let (at, sign) = (steps[i] >> 1, steps[i] & 1);
            let low = at * radix + u128::from(b.0[d]);
            steps[i] = low << 1 | sign;
            steps.push((low + u128::from(b.1[d])) << 1 | (sign ^ 1));
        }
    }
}

/// What regions leave out of an array, and whether they hold anything twice.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Regions that fill what none holds, each element once: where each starts, and its extent.
    pub holes: Vec<(Vec<u64>, Vec<u64>)>,
    /// Whether two regions hold the same element.
    pub overlap: bool,
}

/// Surveys `regions`, which lie within `shape`.
///
/// Cuts the array along one dimension after the other where regions begin or end. This takes n log n time for grids
/// of any number of dimensions, and longer for regions that cross each other.
///
/// # Errors
/// The reason for giving up: too many regions that cross each other, or too many dimensions.
pub fn survey(shape: &[u64], regions: &[Extent]) -> Result<Survey, String> {
    const STEPS_MIN: usize = 1 << 16;
    const STEPS_PER_REGION: usize = 64;
    let regions: Vec<Extent> =
        regions.iter().copied().filter(|(_, sizes)| !sizes.contains(&0)).collect();
    let split = split_dims(shape, &regions);
    let mut sweep = Sweep {
        steps_left: STEPS_MIN + STEPS_PER_REGION * regions.len(),
        at: (vec![0; shape.len()], shape.to_vec()),
        found: Survey::default(),
    };
    if shape.contains(&0) {
        return Ok(sweep.found);
    }
    if split.len() > SPLIT_MAX || sweep.cut(&split, &regions).is_none() {
        return Err(too_many(regions.len(), split.len()));
    }
    Ok(sweep.found)
}

/// The dimensions that some region does not reach through.
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
struct Sweep {
    /// Regions that the sweep may still visit.
    steps_left: usize,
    /// The current piece of the array.
    at: (Vec<u64>, Vec<u64>),
    found: Survey,
}

impl Sweep {
    /// Surveys the current piece. `regions` are those that reach into it; except along `split`, each reaches through
    /// all of it. `None` if that takes too many steps.
    fn cut(&mut self, split: &[usize], regions: &[Extent]) -> Option<()> {
        if regions.is_empty() {
            self.found.holes.push(self.at.clone());
            return Some(());
        }
        let Some((&d, split)) = split.split_first() else {
            self.found.overlap |= regions.len() > 1;
            return Some(());
        };
        let (offset, size) = (self.at.0[d], self.at.1[d]);
        let mut cuts: Vec<u64> = regions.iter().flat_map(|(o, s)| [o[d], o[d] + s[d]]).collect();
        cuts.extend([offset, offset + size]);
        cuts.sort_unstable();
        cuts.dedup();
        let mut coming = regions.to_vec();
        coming.sort_unstable_by_key(|(o, _)| o[d]);
        let (mut coming, mut here) = (coming.into_iter().peekable(), Vec::new());
        for cut in cuts.windows(2) {
            here.retain(|(o, s): &Extent| o[d] + s[d] > cut[0]);
            here.extend(std::iter::from_fn(|| coming.next_if(|(o, _)| o[d] == cut[0])));
            self.steps_left = self.steps_left.checked_sub(here.len() + 1)?;
            (self.at.0[d], self.at.1[d]) = (cut[0], cut[1] - cut[0]);
            self.cut(split, &here)?;
        }
        (self.at.0[d], self.at.1[d]) = (offset, size);
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
            let tiled = tiles(&shape, &lend(&regions)).unwrap();
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
        assert_eq!(tiles(&[4, 2], &lend(&regions)), Ok(false));
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
        assert_eq!(tiles(&[3, 3], &lend(&regions)), Ok(true));
    }

    #[test]
    fn few_regions_split_along_many_dimensions_take_little_memory() {
        let regions = |n: u64| -> Vec<Owned> {
            (0..n).map(|i| ([i].into_iter().chain([0; 15]).collect(), vec![1; 16])).collect()
        };
        let mut shape = [2; 16];
        shape[0] = 500;
        assert_eq!(tiles(&shape, &lend(&regions(10))), Ok(false));
        // Their corners would take 512 MiB.
        assert!(tiles(&shape, &lend(&regions(500))).unwrap_err().contains("16 dimensions"));
    }

    #[test]
    fn regions_split_along_a_hundred_dimensions_are_refused() {
        let regions = [(vec![0; 100], vec![1; 100])];
        assert!(tiles(&[2; 100], &lend(&regions)).unwrap_err().contains("100 dimensions"));
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
    }
}
