//! Tensors in ordinary memory.

use super::Source;
use super::layout::Layout;
use super::runs::copy_runs;
use crate::error::Result;
use crate::format::Element;
use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, PoisonError};

impl Source for &[u8] {
    fn nbytes(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        to.copy_from_slice(&self[offset..offset + to.len()]);
        Ok(())
    }

    fn lend(&self, range: Range<usize>) -> Option<&[u8]> {
        Some(&self[range])
    }
}

impl Source for Vec<u8> {
    fn nbytes(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.as_slice().read(offset, to)
    }

    fn lend(&self, range: Range<usize>) -> Option<&[u8]> {
        Some(&self[range])
    }
}

/// Elements that the source owns or shares: those of a `Vec`, an `Arc<Vec>`, an `Arc<[T]>`.
pub struct OwnedElements<T, D> {
    owner: D,
    element: PhantomData<fn() -> T>,
}

impl<T: Element, D: Deref<Target: AsRef<[T]>>> OwnedElements<T, D> {
    /// Takes the owner.
    pub fn new(owner: D) -> Self {
        Self { owner, element: PhantomData }
    }

    /// The elements, as they are in memory.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice((*self.owner).as_ref())
    }
}

impl<T: Element, D: Deref<Target: AsRef<[T]>> + Send + Sync> Source for OwnedElements<T, D> {
    fn nbytes(&self) -> u64 {
        self.bytes().len() as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.bytes().read(offset, to)
    }

    fn lend(&self, range: Range<usize>) -> Option<&[u8]> {
        Some(&self.bytes()[range])
    }
}

/// Anything that implements [`safetensors::View`].
///
/// If the view lends its bytes, they are copied directly. A view that can only return a copy of all its
/// bytes (candle's tensors) is called once, when its first byte is needed; the copy is freed after its
/// last byte. The extra memory is that of the tensors being copied at the time, not of the model.
#[derive(Debug)]
pub struct ViewSource<V> {
    view: V,
    nbytes: usize,
    /// The view's own copy of its bytes, and how many of them were read.
    copy: Mutex<(Option<Arc<Vec<u8>>>, usize)>,
}

impl<V: safetensors::View> ViewSource<V> {
    /// Wraps a view.
    pub fn new(view: V) -> Self {
        let nbytes = view.data_len();
        Self { view, nbytes, copy: Mutex::default() }
    }

    /// The view's own copy of its bytes, made when `count` are first read. Given up here once all are read.
    fn copied(&self, count: usize) -> Option<Arc<Vec<u8>>> {
        // The view's code runs under this lock and may panic; nothing has changed then.
        let mut copy = self.copy.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match copy.0.take() {
            Some(bytes) => bytes,
            None => match self.view.data() {
                Cow::Borrowed(_) => return None,
                Cow::Owned(bytes) => bytes.into(),
            },
        };
        copy.1 += count;
        if copy.1 >= self.nbytes {
            copy.1 = 0;
        } else {
            copy.0 = Some(bytes.clone());
        }
        Some(bytes)
    }
}

impl<V: safetensors::View + Send + Sync> Source for ViewSource<V> {
    fn nbytes(&self) -> u64 {
        self.nbytes as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        match self.copied(to.len()) {
            Some(bytes) => to.copy_from_slice(&bytes[offset..offset + to.len()]),
            None => to.copy_from_slice(&self.view.data()[offset..offset + to.len()]),
        }
        Ok(())
    }
}

/// A tensor by address, shape and strides, as other languages have it. Reading gathers its elements.
#[derive(Debug)]
pub struct Strided {
    base: *const u8,
    layout: Layout,
}

// SAFETY: a pointer to memory that `new`'s caller promised to leave alone.
unsafe impl Send for Strided {}
// SAFETY: only read from.
unsafe impl Sync for Strided {}

impl Strided {
    /// A tensor of `shape` at `base`, with strides in bytes (`None`: dense, row-major) and elements
    /// of `item` bytes.
    ///
    /// # Safety
    /// All of the tensor's elements are readable, and not written to, until this is dropped.
    pub unsafe fn new(
        base: *const u8,
        item: usize,
        shape: &[usize],
        strides: Option<&[isize]>,
    ) -> Self {
        // SAFETY: the same contract.
        unsafe { Self::of_layout(base, Layout::new(item, shape, strides)) }
    }

    /// A tensor of this layout at `base`.
    ///
    /// # Safety
    /// As for [`Strided::new`].
    pub(crate) unsafe fn of_layout(base: *const u8, layout: Layout) -> Self {
        Self { base, layout }
    }
}

impl Source for Strided {
    fn nbytes(&self) -> u64 {
        self.layout.nbytes() as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.copy(offset, to);
        Ok(())
    }

    fn lend(&self, range: Range<usize>) -> Option<&[u8]> {
        let begin = self.layout.dense_at(range.start)?;
        let from = self.base.wrapping_offset(begin);
        assert!(range.end <= self.layout.nbytes() && range.start <= range.end);
        // SAFETY: the range is within the tensor, whose elements are adjacent, and which the contract of `new` makes
        // readable as long as this exists.
        Some(unsafe { std::slice::from_raw_parts(from, range.len()) })
    }
}

impl Strided {
    /// [`Source::read`], which cannot fail here.
    pub fn copy(&self, offset: usize, to: &mut [u8]) {
        let item = self.layout.item();
        let mut rest = to;
        self.layout.rows(offset, rest.len(), |row| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(row.count * item);
            let from = self.base.wrapping_offset(row.at);
            let (len, count) = match row.stride == item as isize {
                true => (head.len(), 1), // adjacent: one run
                false => (item, row.count),
            };
            let to = (head.as_mut_ptr(), len as isize);
            // SAFETY: the row's elements are the tensor's, which the contract of `new` makes
            // readable; `head` has room for just as many.
            unsafe { copy_runs((from, row.stride), to, len, count) };
            rest = tail;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// A view that panics.
    struct Broken;

    impl safetensors::View for Broken {
        fn dtype(&self) -> safetensors::Dtype {
            safetensors::Dtype::U8
        }
        fn shape(&self) -> &[usize] {
            &[8]
        }
        fn data(&self) -> Cow<'_, [u8]> {
            panic!("broken on purpose")
        }
        fn data_len(&self) -> usize {
            8
        }
    }

    #[test]
    fn view_that_panics_does_so_on_every_thread() {
        let source = ViewSource::new(Broken);
        for _ in 0..2 {
            let read = || source.read(0, &mut [0; 8]);
            let panic = catch_unwind(AssertUnwindSafe(read)).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"broken on purpose"));
        }
    }

    use proptest::prelude::*;

    /// The dense bytes of a strided view, element by element.
    fn expected(data: &[u8], item: usize, shape: &[usize], strides: &[isize]) -> Vec<u8> {
        let mut dense = Vec::new();
        for mut n in 0..shape.iter().product::<usize>() {
            let mut at = data.len() as isize / 2;
            for d in (0..shape.len()).rev() {
                at += (n % shape[d]) as isize * strides[d];
                n /= shape[d];
            }
            dense.extend_from_slice(&data[at as usize..at as usize + item]);
        }
        dense
    }

    proptest! {
        #[test]
        fn any_strided_view_is_gathered_element_by_element(
            item in prop::sample::select(vec![1usize, 2, 4, 8, 16]),
            shape in prop::collection::vec(1..5usize, 0..4),
            strides in prop::collection::vec(-5..6isize, 4),
            cut in any::<prop::sample::Index>(),
        ) {
            let data: Vec<u8> = (0..4096).map(|i| (i * 7 % 251) as u8).collect();
            let strides: Vec<isize> =
                strides.iter().take(shape.len()).map(|s| s * item as isize).collect();
            // SAFETY: 3 dimensions * 4 steps * 5 items of 16 bytes lie within 2048 of the first.
            let source = unsafe { Strided::new(data.as_ptr().add(2048), item, &shape, Some(&strides)) };
            let dense = expected(&data, item, &shape, &strides);
            prop_assert_eq!(source.nbytes(), dense.len() as u64);
            let cut = cut.index(dense.len() / item + 1) * item;
            let mut read = vec![0; dense.len()];
            let (head, tail) = read.split_at_mut(cut);
            source.copy(0, head);
            source.copy(cut, tail);
            prop_assert_eq!(&read, &dense);
            // Elements of which all are adjacent are lent where they are.
            let lent = source.lend(cut..dense.len());
            prop_assert!(lent.is_none_or(|lent| lent == &dense[cut..]));
        }
    }

    #[test]
    fn adjacent_elements_are_lent_and_others_are_not() {
        let bytes: Vec<u8> = (0..100).collect();
        let of = |shape: &[usize], strides: Option<&[isize]>| {
            // SAFETY: all elements are among the 100 bytes.
            let source = unsafe { Strided::new(bytes.as_ptr(), 2, shape, strides) };
            source.lend(2..6).map(<[u8]>::to_vec)
        };
        assert_eq!(of(&[3, 4], None).as_deref(), Some(&bytes[2..6]));
        assert_eq!(of(&[3, 4], Some(&[8, 2])).as_deref(), Some(&bytes[2..6]));
        assert_eq!((of(&[3, 4], Some(&[2, 6])), of(&[8], Some(&[4]))), (None, None));
    }

    #[test]
    fn view_that_must_copy_is_called_once() {
        struct Owned(std::sync::atomic::AtomicUsize);
        impl safetensors::View for Owned {
            fn dtype(&self) -> safetensors::Dtype {
                safetensors::Dtype::U8
            }
            fn shape(&self) -> &[usize] {
                &[4]
            }
            fn data(&self) -> Cow<'_, [u8]> {
                self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                vec![1, 2, 3, 4].into()
            }
            fn data_len(&self) -> usize {
                4
            }
        }
        let source = ViewSource::new(Owned(0.into()));
        let mut read = [0; 4];
        source.read(0, &mut read[..2]).unwrap();
        source.read(2, &mut read[2..]).unwrap();
        assert_eq!(read, [1, 2, 3, 4]);
        assert_eq!(source.view.0.load(std::sync::atomic::Ordering::Relaxed), 1);
        assert!(source.copy.lock().unwrap().0.is_none());
    }
}
