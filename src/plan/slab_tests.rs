//! Slabs and the reads planned for them, compared with copies byte by byte.

use super::*;
use crate::plan::load::{Scattered, Unit};
use proptest::prelude::*;

/// A region of an array in a file, and strides for which no two elements share memory.
#[derive(Debug, Clone)]
struct Case {
    dtype: Dtype,
    begin: u64,
    sizes: Vec<u64>,
    offsets: Vec<u64>,
    lengths: Vec<u64>,
    /// Of the region in memory, in bytes, and the offset of its first element.
    strides: Vec<i64>,
    origin: i64,
    memory: usize,
}

impl Case {
    fn slab(&self) -> Option<Slab> {
        let array = Dense { file: 0, begin: self.begin, dtype: self.dtype, sizes: &self.sizes };
        let strides: Vec<i128> = self.strides.iter().map(|&s| i128::from(s) * 8).collect();
        let to = Place { at: i128::from(self.origin) * 8, strides: &strides };
        Slab::new(array, &self.offsets, &self.lengths, to).unwrap()
    }

    /// (offset in the file, offset in memory) of every byte.
    fn bytes(&self) -> Vec<(u64, i64)> {
        let item = self.dtype.bits() / 8;
        let mut all = Vec::new();
        for mut n in 0..self.lengths.iter().product::<u64>() {
            let (mut from, mut to, mut stride) = (self.begin, self.origin, item);
            for d in (0..self.sizes.len()).rev() {
                let x = n % self.lengths[d];
                n /= self.lengths[d];
                from += (self.offsets[d] + x) * stride;
                to += x as i64 * self.strides[d];
                stride *= self.sizes[d];
            }
            all.extend((0..item).map(|i| (from + i, to + i as i64)));
        }
        all
    }
}

fn any_case() -> impl Strategy<Value = Case> {
    let dims = prop::collection::vec((1..12u64, any::<u64>(), any::<u64>()), 0..5);
    let dtypes = prop::sample::select(vec![Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::C128]);
    let turns = prop::collection::vec((any::<u32>(), any::<bool>(), 0..3i64), 5);
    (dims, dtypes, 0..9000u64, turns).prop_map(|(dims, dtype, begin, turns)| {
        let sizes: Vec<u64> = dims.iter().map(|d| d.0).collect();
        let offsets: Vec<u64> = dims.iter().map(|d| d.1 % (d.0 + 1)).collect();
        let rest = |(d, &offset): (&(u64, u64, u64), &u64)| d.2 % (d.0 - offset + 1);
        let lengths: Vec<u64> = dims.iter().zip(&offsets).map(rest).collect();
        // Dimensions in memory have any order and direction, with or without holes.
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|&d| turns[d].0);
        let (mut strides, mut origin) = (vec![0; sizes.len()], 0);
        let mut step = dtype.bits() as i64 / 8;
        for d in order {
            let (_, backwards, hole) = turns[d];
            step += hole * (dtype.bits() as i64 / 8);
            strides[d] = if backwards { -step } else { step };
            let extent = lengths[d] as i64 * step;
            if backwards {
                origin += extent - step;
            }
            step = extent.max(1);
        }
        let memory = step as usize + 64;
        Case { dtype, begin, sizes, offsets, lengths, strides, origin: origin.max(0), memory }
    })
}

/// A byte of the file, which depends on its offset.
fn file_byte(at: u64) -> u8 {
    (at * 31 % 251) as u8
}

const FILE: u64 = 400_000;

proptest! {
    #[test]
    fn any_regions_are_read_and_scattered_as_if_byte_by_byte(
        cases in prop::collection::vec(any_case(), 1..6),
        unit in prop::sample::select(vec![
            Unit::Blocks { bytes: 4096, most: 4096 }, Unit::Blocks { bytes: 8192, most: 16384 }, Unit::Pages(4096), Unit::Pages(16384),
        ]),
    ) {
        let (cases, slabs): (Vec<Case>, Vec<Slab>) =
            cases.into_iter().filter_map(|case| case.slab().map(|slab| (case, slab))).unzip();
        let plan = Scattered::plan(&slabs, &[FILE], unit);
        let mut memories: Vec<Vec<Option<u8>>> =
            cases.iter().map(|case| vec![None; case.memory]).collect();
        for (number, read) in plan.reads.iter().enumerate() {
            let span = read.offset..read.offset + read.len as u64;
            let block: Vec<u8> = span.clone().map(file_byte).collect();
            for slab in plan.slabs_of(number) {
                slabs[slab].runs(&span, &mut |runs| for i in 0..runs.count {
                    for j in 0..runs.len {
                        let at = runs.to + i as isize * runs.to_step + j as isize;
                        let place = &mut memories[slab][at as usize];
                        assert!(place.is_none(), "written twice");
                        *place = Some(block[runs.from + i * runs.from_step + j]);
                    }
                });
            }
        }
        for ((case, slab), memory) in cases.iter().zip(&slabs).zip(memories) {
            let bytes = case.bytes();
            prop_assert_eq!(slab.nbytes(), bytes.len() as u64);
            let mut expected = vec![None; case.memory];
            for &(from, to) in &bytes {
                expected[to as usize] = Some(file_byte(from));
            }
            prop_assert_eq!(memory, expected);
            let reach = slab.reach();
            prop_assert_eq!(reach.start, bytes.iter().map(|b| b.1).min().unwrap().into());
            prop_assert_eq!(reach.end, i128::from(bytes.iter().map(|b| b.1).max().unwrap()) + 1);
        }
    }

    #[test]
    fn spans_cover_the_needed_bytes_and_gaps_below_the_limit(case in any_case(), gap in 1..200u64) {
        let Some(slab) = case.slab() else { return Ok(()) };
        let mut spans: Vec<Range<u64>> = Vec::new();
        slab.spans(gap, &mut |span| spans.push(span));
        let mut needed: Vec<u64> = case.bytes().iter().map(|b| b.0).collect();
        needed.sort_unstable();
        // Runs of bytes less than `gap` apart, found one by one; spans are no finer.
        let mut naive: Vec<Range<u64>> = Vec::new();
        for at in needed {
            match naive.last_mut() {
                Some(last) if at < last.end + gap => last.end = at + 1,
                _ => naive.push(at..at + 1),
            }
        }
        prop_assert!(spans.windows(2).all(|w| w[0].end <= w[1].start));
        let mut merged: Vec<Range<u64>> = Vec::new();
        for span in spans {
            match merged.last_mut() {
                Some(last) if span.start < last.end + gap => last.end = span.end,
                _ => merged.push(span),
            }
        }
        prop_assert_eq!(merged, naive);
    }
}

fn column_of(rows: u64) -> Slab {
    let sizes = [rows, 2];
    let array = Dense { file: 0, begin: 4096, dtype: Dtype::F32, sizes: &sizes };
    let to = Place { at: 0, strides: &[32, 32] };
    Slab::new(array, &[0, 1], &[rows, 1], to).unwrap().unwrap()
}

#[test]
fn column_of_a_billion_rows_is_one_span() {
    let rows = 1_000_000_000;
    let mut spans = Vec::new();
    column_of(rows).spans(4096, &mut |span| spans.push(span));
    assert_eq!(spans, std::iter::once(4100..4096 + rows * 8).collect::<Vec<_>>());
    let plan = Scattered::plan(&[column_of(rows)], &[5000 + rows * 8], Unit::Pages(4 << 20));
    assert_eq!(plan.reads.len() as u64, (rows * 8).div_ceil(4 << 20));
    let mut emitted = Vec::new();
    column_of(rows).runs(&(1 << 30..(1 << 30) + 4096), &mut |runs| emitted.push(runs));
    assert_eq!(emitted.len(), 1);
    assert_eq!((emitted[0].len, emitted[0].count), (4, 512));
}

#[test]
fn slice_of_rows_reads_only_its_pages_or_chunks() {
    let array = Dense { file: 0, begin: 4096, dtype: Dtype::F32, sizes: &[1 << 14, 1 << 10] };
    let strides = dense_strides(Dtype::F32, &[1 << 10, 1 << 10]);
    let to = Place { at: 0, strides: &strides };
    let slab = Slab::new(array, &[3 << 10, 0], &[1 << 10, 1 << 10], to).unwrap().unwrap();
    let read = |unit| -> usize {
        let plan = Scattered::plan(std::slice::from_ref(&slab), &[(64 << 20) + 4096], unit);
        plan.reads.iter().map(|read| read.len).sum()
    };
    assert_eq!(slab.nbytes(), 4 << 20);
    assert_eq!(read(Unit::Pages(1 << 20)), 4 << 20);
    assert_eq!(read(Unit::Blocks { bytes: 1 << 20, most: 1 << 20 }), 5 << 20);
}

#[test]
fn regions_of_packed_types_must_fall_on_whole_bytes() {
    let region = |dtype: Dtype, sizes: &[u64], offsets: &[u64], lengths: &[u64]| {
        let array = Dense { file: 0, begin: 0, dtype, sizes };
        let strides = dense_strides(dtype, lengths);
        Slab::new(array, offsets, lengths, Place { at: 0, strides: &strides })
    };
    let slab = region(Dtype::F4, &[4, 8], &[1, 2], &[2, 4]).unwrap().unwrap();
    assert_eq!((slab.begin, slab.nbytes()), (5, 4));
    assert_eq!(region(Dtype::F4, &[4, 3], &[2, 0], &[2, 3]).unwrap().unwrap().nbytes(), 3);
    assert_eq!(region(Dtype::F6_E2M3, &[2, 8], &[0, 4], &[2, 4]).unwrap().unwrap().nbytes(), 6);
    for (sizes, offsets, lengths) in
        [([4, 8], [0, 1], [2, 4]), ([4, 8], [0, 0], [2, 3]), ([4, 3], [1, 0], [2, 3])]
    {
        let why = region(Dtype::F4, &sizes, &offsets, &lengths).unwrap_err();
        assert!(why.contains("whole bytes"), "{why}");
    }
}

#[test]
fn impossible_regions_and_strides_are_refused() {
    let refused = |offsets: &[u64], lengths: &[u64], strides: &[i128]| {
        let array = Dense { file: 0, begin: 0, dtype: Dtype::F32, sizes: &[4, 4] };
        Slab::new(array, offsets, lengths, Place { at: 0, strides }).unwrap_err()
    };
    assert!(refused(&[3, 0], &[2, 1], &[128, 32]).contains("outside"));
    assert!(refused(&[u64::MAX, 0], &[2, 1], &[128, 32]).contains("outside"));
    assert!(refused(&[0], &[2], &[32]).contains("2 dimensions"));
    assert!(refused(&[0, 0], &[2, 2], &[0, 32]).contains("share memory"));
    assert!(refused(&[0, 0], &[2, 2], &[32, 32]).contains("share memory"));
    assert!(refused(&[0, 0], &[2, 2], &[16, 32]).contains("share memory"));
    assert!(refused(&[0, 0], &[2, 2], &[i128::MAX - 7, 32]).contains("leave"));
    assert!(refused(&[0, 0], &[2, 2], &[1 << 70, 32]).contains("leave"));
}
