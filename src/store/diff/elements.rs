//! Counts elements that differ, and measures by how much.

use crate::format::Dtype;
use half::{bf16, f16};
use serde::Serialize;

/// How the elements of two tensors differ, bit by bit: two NaN of the same bits are equal, 0.0 and -0.0 are not.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ElementDiff {
    /// Elements that differ.
    pub differing: u64,
    /// Elements in all.
    pub elements: u64,
    /// The largest absolute difference between two finite elements, [`f64::MAX`] if it is larger. `None` for dtypes
    /// that are neither floats nor integers, or if no two such elements differ.
    pub max_abs: Option<f64>,
    /// Elements that differ, one of which is infinite or not a number.
    pub not_finite: u64,
    #[serde(skip)]
    dtype: Dtype,
}

impl ElementDiff {
    pub(super) fn of(dtype: Dtype) -> Self {
        Self { differing: 0, elements: 0, max_abs: None, not_finite: 0, dtype }
    }

    /// Compares more elements, which are dense.
    pub(super) fn add(&mut self, one: &[u8], other: &[u8]) {
        self.elements += one.len() as u64 * 8 / self.dtype.bits();
        if one == other {
            return;
        }
        match self.dtype {
            Dtype::U8 => self.numbers(one, other, u8::from_le_bytes, f64::from),
            Dtype::U16 => self.numbers(one, other, u16::from_le_bytes, f64::from),
            Dtype::U32 => self.numbers(one, other, u32::from_le_bytes, f64::from),
            Dtype::I8 => self.numbers(one, other, i8::from_le_bytes, f64::from),
            Dtype::I16 => self.numbers(one, other, i16::from_le_bytes, f64::from),
            Dtype::I32 => self.numbers(one, other, i32::from_le_bytes, f64::from),
            Dtype::U64 => self.wide(one, other, |bytes| u64::from_le_bytes(bytes).into()),
            Dtype::I64 => self.wide(one, other, |bytes| i64::from_le_bytes(bytes).into()),
            Dtype::F16 => self.numbers(one, other, f16::from_le_bytes, f64::from),
            Dtype::BF16 => self.numbers(one, other, bf16::from_le_bytes, f64::from),
            Dtype::F32 => self.numbers(one, other, f32::from_le_bytes, f64::from),
            Dtype::F64 => self.numbers(one, other, f64::from_le_bytes, f64::from),
            Dtype::F8_E4M3 => self.numbers(one, other, u8::from_le_bytes, e4m3),
            Dtype::F8_E5M2 => self.numbers(one, other, u8::from_le_bytes, e5m2),
            Dtype::F8_E4M3FNUZ => self.numbers(one, other, u8::from_le_bytes, e4m3fnuz),
            Dtype::F8_E5M2FNUZ => self.numbers(one, other, u8::from_le_bytes, e5m2fnuz),
            _ => self.bits(one, other),
        }
    }

    fn numbers<T, const N: usize>(
        &mut self,
        one: &[u8],
        other: &[u8],
        read: impl Fn([u8; N]) -> T,
        number: impl Fn(T) -> f64,
    ) {
        self.each(one, other, |x, y| {
            let (x, y) = (number(read(x)), number(read(y)));
            (x.is_finite() && y.is_finite()).then(|| (x - y).abs().min(f64::MAX))
        });
    }

    /// Integers that a double cannot hold exactly: their difference is taken before it is rounded.
    fn wide(&mut self, one: &[u8], other: &[u8], read: impl Fn([u8; 8]) -> i128) {
        self.each(one, other, |x, y| Some((read(x) - read(y)).abs() as f64));
    }

    fn each<const N: usize>(
        &mut self,
        one: &[u8],
        other: &[u8],
        distance: impl Fn([u8; N], [u8; N]) -> Option<f64>,
    ) {
        for (x, y) in one.as_chunks::<N>().0.iter().zip(other.as_chunks::<N>().0) {
            if x == y {
                continue;
            }
            self.differing += 1;
            match distance(*x, *y) {
                Some(apart) => self.max_abs = Some(self.max_abs.unwrap_or(0.0).max(apart)),
                None => self.not_finite += 1,
            }
        }
    }

    /// Counts elements of any number of bits.
    fn bits(&mut self, one: &[u8], other: &[u8]) {
        let bits = self.dtype.bits() as usize;
        if bits.is_multiple_of(8) {
            let pairs = one.chunks_exact(bits / 8).zip(other.chunks_exact(bits / 8));
            self.differing += pairs.filter(|(x, y)| x != y).count() as u64;
            return;
        }
        let differs = |bit: usize| (one[bit / 8] ^ other[bit / 8]) >> (bit % 8) & 1 == 1;
        let elements = one.len() * 8 / bits;
        let count = (0..elements).filter(|n| (n * bits..(n + 1) * bits).any(differs)).count();
        self.differing += count as u64;
    }
}

/// float8 e4m3fn: no infinities; all ones are NaN.
fn e4m3(bits: u8) -> f64 {
    match bits & 0x7f {
        0x7f => f64::NAN,
        _ => small(bits, 3, 7),
    }
}

/// float8 e5m2: the upper half of an IEEE half.
fn e5m2(bits: u8) -> f64 {
    f16::from_bits(u16::from(bits) << 8).into()
}

fn e4m3fnuz(bits: u8) -> f64 {
    if bits == 0x80 { f64::NAN } else { small(bits, 3, 8) }
}

fn e5m2fnuz(bits: u8) -> f64 {
    if bits == 0x80 { f64::NAN } else { small(bits, 2, 16) }
}

/// A float of a sign bit, an exponent with this bias, and a mantissa of some bits.
fn small(bits: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let exponent = i32::from((bits & 0x7f) >> mantissa_bits);
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - bias),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diff(dtype: Dtype, one: &[u8], other: &[u8]) -> (u64, Option<f64>, u64) {
        let mut diff = ElementDiff::of(dtype);
        diff.add(one, other);
        (diff.differing, diff.max_abs, diff.not_finite)
    }

    #[test]
    fn differences_are_those_of_the_numbers() {
        let f32s = |numbers: [f32; 3]| numbers.map(f32::to_le_bytes).concat();
        let (one, other) = (f32s([1.0, f32::NAN, 2.0]), f32s([1.5, f32::NAN, 2.0]));
        assert_eq!(diff(Dtype::F32, &one, &other), (1, Some(0.5), 0));
        let other = f32s([1.0, 3.0, f32::INFINITY]);
        assert_eq!(diff(Dtype::F32, &one, &other), (2, None, 2));
        let bf16s = |x: f32| bf16::from_f32(x).to_le_bytes();
        assert_eq!(diff(Dtype::BF16, &bf16s(-4.0), &bf16s(4.0)), (1, Some(8.0), 0));
        assert_eq!(diff(Dtype::U8, &[0, 255, 7], &[255, 0, 7]), (2, Some(255.0), 0));
        let wide = |n: i64| n.to_le_bytes();
        let most = diff(Dtype::I64, &wide(i64::MIN), &wide(i64::MAX));
        assert_eq!(most, (1, Some(u64::MAX as f64), 0));
        let most = diff(Dtype::F64, &f64::MIN.to_le_bytes(), &f64::MAX.to_le_bytes());
        assert_eq!(most, (1, Some(f64::MAX), 0), "both are finite");
        assert_eq!(diff(Dtype::BOOL, &[0, 1], &[1, 1]), (1, None, 0));
        assert_eq!(diff(Dtype::C64, &[0; 16], &[[0; 8], [1; 8]].concat()), (1, None, 0));
        // Nibbles; groups of six bits.
        assert_eq!(diff(Dtype::F4, &[0x12, 0x34], &[0x13, 0x34]), (1, None, 0));
        assert_eq!(diff(Dtype::F6_E2M3, &[0, 0, 0], &[0b1100_0000, 0, 0]), (1, None, 0));
    }

    #[test]
    fn small_floats_are_decoded() {
        assert_eq!([0x38, 0xb8, 0x01, 0x7e].map(e4m3), [1.0, -1.0, 2f64.powi(-9), 448.0]);
        assert_eq!([0x3c, 0x7b].map(e5m2), [1.0, 57344.0]);
        assert_eq!([0x40, 0x7f].map(e4m3fnuz), [1.0, 240.0]);
        assert_eq!([0x40, 0x7f].map(e5m2fnuz), [1.0, 57344.0]);
        assert!(e4m3(0xff).is_nan() && e4m3fnuz(0x80).is_nan() && e5m2(0x7e).is_nan());
    }
}
