//! A run of a tensor's dense bytes as copies that a GPU makes: few and wide ones.
//!
//! A GPU copies rows of bytes that lie evenly apart in one go. Where the elements are in another
//! order in memory than in the file, they are copied in memory's order, as wide as can be, and the
//! CPU reorders them once they are in the staging buffer. Pure: nothing is copied here.

use crate::device::layout::Layout;

/// Rows of bytes evenly apart in a GPU's memory, which go to the host back to back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    /// Bytes from the tensor's first element to the first row.
    pub at: isize,
    /// Bytes of a row.
    pub width: usize,
    /// Bytes from one to the next; at least `width`, unless there is only one.
    pub pitch: usize,
    /// How many.
    pub height: usize,
}

/// Bytes that must be reordered: they arrive in memory's order.
#[derive(Debug, Clone)]
pub(super) struct Reorder {
    /// Where they begin, from the first of the run.
    pub start: usize,
    /// Where among them each element is to be found, in the file's order.
    pub layout: Layout,
}

/// Calls `copy` for each copy of `len` dense bytes from `offset` on, in the order in which their bytes
/// arrive, and `reorder` for the bytes that must be reordered then.
pub(super) fn pieces(
    layout: &Layout,
    offset: usize,
    len: usize,
    mut copy: impl FnMut(Rows),
    mut reorder: impl FnMut(Reorder),
) {
    let item = layout.item();
    let (first, end) = (offset / item, (offset + len) / item);
    let mut start = 0;
    boxes(layout.dims(), first, end, 0, &mut Vec::new(), &mut |at, dims| {
        let order = memory_order(dims);
        rows(item, at, dims, &order, &mut copy);
        let bytes = dims.iter().map(|dim| dim.0).product::<usize>() * item;
        if !order.is_sorted() {
            reorder(Reorder { start, layout: in_order(item, dims, &order) });
        }
        start += bytes;
    });
}

/// (size, stride in bytes).
type Dim = (usize, isize);

/// Cuts elements `first..end`, in row-major order, into boxes: what is left of the first row, whole
/// rows, what there is of the last, and so on in each of them. `each` gets a box's place, and its
/// dimensions longer than 1.
fn boxes(
    dims: &[Dim],
    first: usize,
    end: usize,
    at: isize,
    outer: &mut Vec<Dim>,
    each: &mut impl FnMut(isize, &[Dim]),
) {
    if first >= end {
        return;
    }
    let Some((&(_, stride), inner)) = dims.split_first() else { return each(at, outer) };
    let len: usize = inner.iter().map(|dim| dim.0).product();
    let place = |row: usize| at + row as isize * stride;
    let (mut row, last) = (first / len, end / len);
    if row == last {
        return boxes(inner, first % len, end % len, place(row), outer, each);
    }
    if !first.is_multiple_of(len) {
        boxes(inner, first % len, len, place(row), outer, each);
        row += 1;
    }
    if row < last {
        let depth = outer.len();
        outer.extend([(last - row, stride)].iter().chain(inner).filter(|dim| dim.0 > 1));
        each(place(row), outer);
        outer.truncate(depth);
    }
    boxes(inner, 0, end % len, place(last), outer, each);
}

/// The dimensions' numbers by falling stride, as they lie in memory; those that repeat the same
/// elements first.
fn memory_order(dims: &[Dim]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..dims.len()).collect();
    order.sort_by_key(|&dim| {
        let stride = dims[dim].1.unsigned_abs();
        std::cmp::Reverse(if stride == 0 { usize::MAX } else { stride })
    });
    order
}

/// The rows of a box in memory's order.
fn rows(item: usize, at: isize, dims: &[Dim], order: &[usize], copy: &mut impl FnMut(Rows)) {
    let mut outer: Vec<Dim> = order.iter().map(|&dim| dims[dim]).collect();
    let mut width = item;
    while let Some((size, _)) = outer.pop_if(|dim| dim.1 == width as isize) {
        width *= size;
    }
    let (height, pitch) = match outer.pop_if(|dim| dim.1 > width as isize) {
        Some((size, stride)) => (size, stride as usize),
        None => (1, width),
    };
    walk(&outer, at, &mut |at| copy(Rows { at, width, pitch, height }));
}

/// Every index of the dimensions, in order.
fn walk(dims: &[Dim], at: isize, each: &mut impl FnMut(isize)) {
    let Some((&(size, stride), inner)) = dims.split_first() else { return each(at) };
    for index in 0..size {
        walk(inner, at + index as isize * stride, each);
    }
}

/// The layout of a box whose dimensions lie densely in this order.
fn in_order(item: usize, dims: &[Dim], order: &[usize]) -> Layout {
    let sizes: Vec<usize> = dims.iter().map(|dim| dim.0).collect();
    let mut strides = vec![0; dims.len()];
    let mut step = item as isize;
    for &dim in order.iter().rev() {
        strides[dim] = step;
        step *= sizes[dim] as isize;
    }
    Layout::new(item, &sizes, Some(&strides))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::host::Strided;
    use proptest::prelude::*;

    /// What a GPU and the CPU after it make of a run.
    fn brought(memory: &[u8], first: usize, layout: &Layout, offset: usize, len: usize) -> Vec<u8> {
        let (mut landed, mut reorders) = (Vec::new(), Vec::new());
        let copy = |rows: Rows| {
            assert!(rows.height == 1 || rows.pitch >= rows.width);
            for row in 0..rows.height {
                let at = (first as isize + rows.at) as usize + row * rows.pitch;
                landed.extend_from_slice(&memory[at..at + rows.width]);
            }
        };
        pieces(layout, offset, len, copy, |reorder| reorders.push(reorder));
        for Reorder { start, layout } in reorders {
            let nbytes = layout.nbytes();
            let before = landed[start..start + nbytes].to_vec();
            // SAFETY: the layout is that of these bytes.
            let source = unsafe { Strided::of_layout(before.as_ptr(), layout) };
            source.copy(0, &mut landed[start..start + nbytes]);
        }
        landed
    }

    proptest! {
        #[test]
        fn any_run_of_any_layout_comes_as_the_cpu_would_gather_it(
            item in prop::sample::select(vec![1usize, 2, 4, 8, 16]),
            shape in prop::collection::vec(1..5usize, 0..4),
            strides in prop::collection::vec(-6..6isize, 4),
            from in any::<prop::sample::Index>(),
            len in any::<prop::sample::Index>(),
        ) {
            let memory: Vec<u8> = (0..8192).map(|i| (i * 7 % 251) as u8).collect();
            let first = 4096;
            let strides: Vec<isize> =
                strides.iter().take(shape.len()).map(|s| s * item as isize).collect();
            let layout = Layout::new(item, &shape, Some(&strides));
            let elements = layout.nbytes() / item;
            let offset = from.index(elements) * item;
            let len = (len.index(elements - offset / item) + 1) * item;
            let mut expected = vec![0; len];
            // SAFETY: 3 dimensions * 4 steps * 6 items of 16 bytes lie within 4096 of `first`.
            let source = unsafe { Strided::of_layout(&memory[first], layout.clone()) };
            source.copy(offset, &mut expected);
            prop_assert_eq!(brought(&memory, first, &layout, offset, len), expected);
        }
    }

    fn count(shape: &[usize], strides: &[isize], offset: usize, len: usize) -> (usize, usize) {
        let (mut copies, mut reorders) = (0, 0);
        let layout = Layout::new(4, shape, Some(strides));
        pieces(&layout, offset, len, |_| copies += 1, |_| reorders += 1);
        (copies, reorders)
    }

    #[test]
    fn usual_layouts_take_few_copies() {
        // Dense; columns of a wider matrix; its transpose; channels last; the same row for ever.
        assert_eq!(count(&[64, 32], &[128, 4], 512, 4096), (1, 0));
        assert_eq!(count(&[64, 32], &[512, 4], 0, 8192), (1, 0));
        assert_eq!(count(&[64, 32], &[4, 256], 0, 4096), (1, 1));
        assert_eq!(count(&[8, 16, 3, 3], &[576, 4, 192, 64], 0, 4608), (1, 1));
        assert_eq!(count(&[50, 32], &[0, 4], 0, 6400), (50, 0));
    }
}
