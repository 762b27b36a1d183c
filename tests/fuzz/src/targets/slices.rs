//! Load requests as the Python package hands them over: a region of a chunk, and memory with strides for it.

use crate::input::Input;
use ringstow::Dtype;
use ringstow::internals::plan::load::{Scattered, Unit};
use ringstow::internals::plan::slab::{Dense, Place, Slab};

pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let dtype = Dtype::ALL[input.below(Dtype::ALL.len())];
    let is_huge = input.byte().is_multiple_of(4);
    let dims = input.below(6);
    let number = |input: &mut Input| match is_huge {
        true => input.u64(),
        false => u64::from(input.byte() % 12),
    };
    let mut list = || (0..dims).map(|_| number(&mut input)).collect::<Vec<u64>>();
    let (sizes, mut offsets, mut lengths) = (list(), list(), list());
    let begin = u64::from(input.byte()) << (input.byte() % 50);
    // Few inputs have a region within its array, so most are made to.
    if input.byte().is_multiple_of(2) {
        for d in 0..dims {
            offsets[d] %= sizes[d].saturating_add(1);
            lengths[d] %= (sizes[d] - offsets[d]).saturating_add(1);
        }
    }
    let stride = |input: &mut Input| match is_huge {
        true => i128::from(input.u64() as i64) * 8,
        false => i128::from(input.byte() as i8) * i128::from(dtype.bits()),
    };
    let strides: Vec<i128> = (0..dims).map(|_| stride(&mut input)).collect();
    // The manifest's check has refused chunks whose end overflows.
    let Some(nbytes) = dtype.nbytes(&sizes) else { return };
    let Some(end) = begin.checked_add(nbytes) else { return };
    let array = Dense { file: 0, begin, dtype, sizes: &sizes };
    let place = Place { at: 0, strides: &strides };
    let Ok(Some(slab)) = Slab::new(array, &offsets, &lengths, place) else { return };
    assert_eq!(Some(slab.nbytes()), dtype.nbytes(&lengths));
    let reach = slab.reach();
    assert!(reach.start <= reach.end && reach.end - reach.start >= i128::from(slab.nbytes()));
    if slab.nbytes() > 1 << 16 || end - begin > 1 << 20 {
        return;
    }
    check_bytes(&slab, begin..end, dtype, (&sizes, &offsets, &lengths), &strides);
}

/// Every byte of the region goes to its place, and no other is touched.
fn check_bytes(
    slab: &Slab,
    file: std::ops::Range<u64>,
    dtype: Dtype,
    (sizes, offsets, lengths): (&[u64], &[u64], &[u64]),
    strides: &[i128],
) {
    let reach = slab.reach();
    let memory_bytes = (reach.end - reach.start) as usize;
    if memory_bytes > 1 << 20 {
        return;
    }
    let plan = Scattered::plan(
        std::slice::from_ref(slab),
        &[file.end],
        Unit::Blocks { bytes: 4096, most: 8192 },
    );
    assert!(plan.reads.iter().all(|read| read.range().end <= file.end && read.len > 0));
    let mut memory = vec![0u32; memory_bytes];
    for read in &plan.reads {
        slab.runs(&read.range(), &mut |runs| {
            for step in 0..runs.count {
                let from = read.offset + (runs.from + step * runs.from_step) as u64;
                let to = runs.to as i128 + step as i128 * runs.to_step as i128 - reach.start;
                for byte in 0..runs.len {
                    let at = from + byte as u64;
                    assert!(file.contains(&at) && at < read.range().end);
                    let place = &mut memory[to as usize + byte];
                    assert_eq!(*place, 0, "two bytes go to one place");
                    *place = (at - file.start) as u32 + 1;
                }
            }
        });
    }
    let written = memory.iter().filter(|&&from| from > 0).count();
    assert_eq!(written as u64, slab.nbytes());
    // Element by element, for types of whole bytes.
    let Some(item) = dtype.bits().is_multiple_of(8).then_some(dtype.bits() / 8) else { return };
    let mut at = vec![0; sizes.len()];
    loop {
        let (mut from, mut to) = (0, -reach.start);
        for d in 0..sizes.len() {
            from = from * sizes[d] + offsets[d] + at[d];
            to += i128::from(at[d]) * strides[d] / 8;
        }
        for byte in 0..item {
            assert_eq!(u64::from(memory[to as usize + byte as usize]), from * item + byte + 1);
        }
        let Some(d) = (0..at.len()).rev().find(|&d| at[d] + 1 < lengths[d]) else { return };
        at[d] += 1;
        at[d + 1..].fill(0);
    }
}
