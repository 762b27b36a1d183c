//! Where a tensor's elements lie in memory, and where to find a run of its dense bytes.

use smallvec::SmallVec;

/// A tensor's shape and strides. Its dense bytes are those in row-major order, whatever the strides.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    item: usize,
    /// (size, stride in bytes) a dimension, outermost first; adjacent ones merged where dense.
    dims: SmallVec<[(usize, isize); 1]>,
    nbytes: usize,
}

/// Elements evenly apart, one after the other in the dense bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    /// Bytes from the tensor's first element to the row's.
    pub at: isize,
    /// Bytes from one to the next.
    pub stride: isize,
    /// How many.
    pub count: usize,
}

impl Layout {
    /// Elements of `item` bytes, strides in bytes (`None`: dense, row-major).
    pub fn new(item: usize, shape: &[usize], strides: Option<&[isize]>) -> Self {
        let nbytes = shape.iter().product::<usize>() * item;
        let mut dims = SmallVec::new();
        match strides {
            None => dims.push((nbytes / item.max(1), item as isize)),
            Some(strides) => {
                for (&size, &stride) in shape.iter().zip(strides).filter(|(size, _)| **size != 1) {
                    match dims.last_mut() {
                        Some((outer, step)) if *step == stride * size as isize => {
                            *outer *= size;
                            *step = stride;
                        }
                        _ => dims.push((size, stride)),
                    }
                }
            }
        }
        if dims.is_empty() {
            dims.push((1, item as isize));
        }
        Self { item, dims, nbytes }
    }

    /// Bytes of an element.
    pub fn item(&self) -> usize {
        self.item
    }

    /// (size, stride in bytes) a dimension, outermost first; there is always one.
    #[cfg(feature = "cuda")]
    pub fn dims(&self) -> &[(usize, isize)] {
        &self.dims
    }

    /// Bytes of the dense data.
    pub fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Bytes from the first element to the dense byte `offset`, if all elements are adjacent and in order.
    pub fn dense_at(&self, offset: usize) -> Option<isize> {
        match self.dims[..] {
            [(_, stride)] if stride == self.item as isize => Some(offset as isize),
            _ => None,
        }
    }

    /// The rows that make up `len` dense bytes from `offset` on, in order.
    ///
    /// # Panics
    /// If the bytes are not all there, or are not whole elements.
    pub fn rows(&self, offset: usize, len: usize, mut each: impl FnMut(Row)) {
        assert!(offset + len <= self.nbytes);
        assert!(offset.is_multiple_of(self.item) && len.is_multiple_of(self.item));
        let &(size, stride) = self.dims.last().expect("there is always one");
        let (mut element, end) = (offset / self.item, (offset + len) / self.item);
        while element < end {
            let (row, within) = self.locate(element);
            let count = (size - within).min(end - element);
            each(Row { at: row + within as isize * stride, stride, count });
            element += count;
        }
    }

    /// Where the row of this element begins, and the element's index in it.
    fn locate(&self, mut element: usize) -> (isize, usize) {
        let mut offset = 0isize;
        let (inner, outer) = self.dims.split_last().expect("there is always one");
        let within = element % inner.0;
        element /= inner.0;
        for &(size, stride) in outer.iter().rev() {
            offset += (element % size) as isize * stride;
            element /= size;
        }
        (offset, within)
    }
}
