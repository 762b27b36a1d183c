//! Whether boxes fill an array: each element once, none left out, none held twice.

use std::ops::Range;

/// A box: where it starts and its extent, one number a dimension.
pub type Extent<'a> = (&'a [u64], &'a [u64]);

/// Whether a box has as many dimensions as `shape`, and reaches beyond it in none.
pub fn within(shape: &[u64], (offsets, sizes): Extent) -> bool {
    offsets.len() == shape.len()
        && sizes.len() == shape.len()
        && (0..shape.len())
            .all(|d| offsets[d].checked_add(sizes[d]).is_some_and(|end| end <= shape[d]))
}

/// The most dimensions along which an array may be split, and the most corners that are counted
/// (16 bytes each): a million boxes split along four dimensions, with room to spare.
const SPLIT_MAX: usize = 16;
const CORNERS_MAX: usize = 1 << 25;

/// Whether `boxes`, which lie within `shape`, hold each of its elements exactly once.
///
/// Takes time n log n in the number of boxes, however they lie: how often each element is held is
/// a step function, and known from its steps, which are at the corners of boxes. So the corners,
/// each counted as plus or minus one, must cancel but for those of the whole array.
///
/// # Errors
/// What keeps it from being found out: boxes split along very many dimensions.
pub fn tiles(shape: &[u64], boxes: &[Extent]) -> Result<bool, String> {
    if shape.contains(&0) {
        return Ok(true);
    }
    let split: Vec<usize> = (0..shape.len())
        .filter(|&d| boxes.iter().any(|(offsets, sizes)| offsets[d] > 0 || sizes[d] < shape[d]))
        .collect();
    let corners = (boxes.len() + 1).checked_shl(split.len() as u32);
    if split.len() > SPLIT_MAX || corners.is_none_or(|n| n > CORNERS_MAX) {
        return Err(format!(
            "{} chunks are split along {} dimensions, which is more than can be checked",
            boxes.len(),
            split.len()
        ));
    }
    let zeros = vec![0; shape.len()];
    let mut steps = Vec::with_capacity(corners.unwrap_or(0));
    push_corners(&mut steps, shape, &split, (&zeros, shape), true);
    for &extent in boxes.iter().filter(|(_, sizes)| !sizes.contains(&0)) {
        push_corners(&mut steps, shape, &split, extent, false);
    }
    steps.sort_unstable();
    Ok(steps.chunk_by(|a, b| a >> 1 == b >> 1).all(|same| {
        let minus = same.partition_point(|step| step & 1 == 0);
        minus * 2 == same.len()
    }))
}

/// Pushes each corner of a box as its position in row-major order, with its sign as the last bit.
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

/// A box of `shape` that none of `boxes` touches, if there is one. For messages: takes quadratic
/// time, so that of very many boxes nothing is said.
pub fn hole(shape: &[u64], boxes: &[Extent]) -> Option<Vec<Range<u64>>> {
    const BOXES_MAX: usize = 10_000;
    (boxes.len() <= BOXES_MAX).then(|| hole_from(0, shape, boxes)).flatten()
}

fn hole_from(d: usize, shape: &[u64], boxes: &[Extent]) -> Option<Vec<Range<u64>>> {
    if boxes.is_empty() {
        return Some(shape[d..].iter().map(|&size| 0..size).collect());
    }
    if d == shape.len() {
        return None;
    }
    let mut cuts: Vec<u64> = boxes.iter().flat_map(|(o, s)| [o[d], o[d] + s[d]]).collect();
    cuts.extend([0, shape[d]]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).find_map(|cut| {
        let spans = |(o, s): &&Extent| o[d] <= cut[0] && cut[1] <= o[d] + s[d];
        let here: Vec<Extent> = boxes.iter().filter(spans).copied().collect();
        let mut rest = hole_from(d + 1, shape, &here)?;
        rest.insert(0, cut[0]..cut[1]);
        Some(rest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Owned = (Vec<u64>, Vec<u64>);

    fn lend(boxes: &[Owned]) -> Vec<Extent<'_>> {
        boxes.iter().map(|(o, s)| (o.as_slice(), s.as_slice())).collect()
    }

    /// How often each element is held, one by one.
    fn counts(shape: &[u64], boxes: &[Owned]) -> Vec<usize> {
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
        (0..elements).map(|n| boxes.iter().filter(|b| holds(b, &at(n))).count()).collect()
    }

    /// Splits a box in two again and again, at places that `choices` says.
    fn split(shape: &[u64], choices: &[(usize, usize, u64)]) -> Vec<Owned> {
        let mut boxes = vec![(vec![0; shape.len()], shape.to_vec())];
        for &(which, d, at) in choices {
            let (which, d) = (which % boxes.len(), d % shape.len());
            let (mut offsets, mut sizes) = boxes[which].clone();
            let at = at % (sizes[d] + 1);
            boxes[which].1[d] = at;
            offsets[d] += at;
            sizes[d] -= at;
            boxes.push((offsets, sizes));
        }
        boxes
    }

    proptest! {
        #[test]
        fn boxes_tile_an_array_if_each_element_is_held_once(
            shape in prop::collection::vec(1..6u64, 1..4),
            choices in prop::collection::vec((any::<usize>(), any::<usize>(), any::<u64>()), 0..8),
            moved in prop::option::of((any::<usize>(), any::<usize>(), any::<u64>())),
        ) {
            let mut boxes = split(&shape, &choices);
            if let Some((which, d, by)) = moved {
                let (which, d) = (which % boxes.len(), d % shape.len());
                let (offsets, sizes) = &mut boxes[which];
                offsets[d] = by % (shape[d] - sizes[d] + 1);
            }
            let counts = counts(&shape, &boxes);
            let tiled = tiles(&shape, &lend(&boxes)).unwrap();
            prop_assert_eq!(tiled, counts.iter().all(|&n| n == 1));
            let hole = hole(&shape, &lend(&boxes));
            prop_assert_eq!(hole.is_some(), counts.contains(&0));
            if let Some(hole) = hole {
                let of = hole.iter().map(|r| (r.start, r.end - r.start)).unzip();
                boxes.retain(|(_, sizes)| !sizes.contains(&0));
                let with: Vec<usize> = counts.clone();
                boxes.push(of);
                let filled = super::tests::counts(&shape, &boxes);
                prop_assert!(with.iter().zip(filled).all(|(&a, b)| a == b || (a == 0 && b == 1)));
            }
        }
    }

    #[test]
    fn sums_alone_do_not_hide_a_hole() {
        let boxes = [(vec![0, 0], vec![2, 2]), (vec![1, 0], vec![2, 2])];
        assert_eq!(tiles(&[4, 2], &lend(&boxes)), Ok(false));
        assert_eq!(hole(&[4, 2], &lend(&boxes)), Some(vec![3..4, 0..2]));
    }

    #[test]
    fn a_pinwheel_that_no_straight_cut_parts_is_fine() {
        let boxes = [
            (vec![0, 0], vec![1, 2]),
            (vec![0, 2], vec![2, 1]),
            (vec![2, 1], vec![1, 2]),
            (vec![1, 0], vec![2, 1]),
            (vec![1, 1], vec![1, 1]),
        ];
        assert_eq!(tiles(&[3, 3], &lend(&boxes)), Ok(true));
    }

    #[test]
    fn boxes_split_along_a_hundred_dimensions_are_refused_at_once() {
        let boxes = [(vec![0; 100], vec![1; 100])];
        assert!(tiles(&[2; 100], &lend(&boxes)).unwrap_err().contains("100 dimensions"));
    }
}
