//! A receipt as bytes. A text as JSON would take five times the space, and a coordinator receives one from each of
//! thousands of ranks.
//!
//! What ranks have in common is in one piece, so that [`merge`](super::merge()) reads it once: the names, dtypes and
//! shapes. A receipt is
//!
//! - eight bytes that say what it is, and one for the version of this form;
//! - rank, session, write, bytes of a checksum chunk, parts set apart;
//! - the tensors: how many bytes follow; then for each how many bytes its name shares with the beginning and with the end
//!   of the one before, what is between them, its dtype, whether it is an object, and its shape;
//! - the chunks of each tensor: how many bytes follow; then for each tensor their number, and for each chunk the file,
//!   the offset in it, and 0; or 1, how many dimensions it has, offsets and sizes;
//! - the files: for each its name, its length, its checksums of four bytes, and the hashes of its tensor chunks: where
//!   each begins, and sixteen bytes;
//! - the CRC-32 of all before, in four bytes.
//!
//! Numbers are in as many bytes as they need, seven bits in each, the lowest first. Texts and lists follow their length.
//! Whatever the bytes are, reading them takes at most 64 times their length.

use super::Receipt;
use crate::format::lists;
use crate::format::manifest::{Chunk, FileEntry, TensorEntry};
use crate::format::{ChunkHash, Dtype, Shape};

const MAGIC: &[u8; 8] = b"rstow-rc";
const VERSION: u8 = 1;

/// Bytes of a name that it can share at each end with the one before: so a few bytes never make a long name.
const SHARED_MAX: usize = 64;

type Read<T> = std::result::Result<T, String>;

/// Packs a receipt.
pub fn pack(receipt: &Receipt) -> Vec<u8> {
    let mut to = [&MAGIC[..], &[VERSION]].concat();
    put(&mut to, receipt.rank.into());
    put_bytes(&mut to, receipt.session.as_bytes());
    put_bytes(&mut to, receipt.write.as_bytes());
    put(&mut to, receipt.block_bytes);
    put(&mut to, receipt.apart.len() as u64);
    receipt.apart.iter().for_each(|part| put_bytes(&mut to, part.as_bytes()));
    put_bytes(&mut to, &pack_tensors(&receipt.tensors));
    put_bytes(&mut to, &pack_chunks(&receipt.tensors));
    put(&mut to, receipt.files.len() as u64);
    for FileEntry { name, bytes, crc32, hashes } in &receipt.files {
        put_bytes(&mut to, name.as_bytes());
        put(&mut to, *bytes);
        put(&mut to, crc32.len() as u64);
        crc32.iter().for_each(|crc32| to.extend(crc32.to_le_bytes()));
        put(&mut to, hashes.len() as u64);
        for ChunkHash { begin, hash } in hashes {
            put(&mut to, *begin);
            to.extend(hash.to_le_bytes());
        }
    }
    let crc32 = crc32fast::hash(&to);
    to.extend(crc32.to_le_bytes());
    to
}

fn pack_tensors(tensors: &[TensorEntry]) -> Vec<u8> {
    let (mut to, mut before) = (Vec::new(), "".as_bytes());
    for TensorEntry { name, dtype, shape, object, .. } in tensors {
        let name = name.as_bytes();
        let first = equal(name.iter().zip(before));
        let (rest, rest_before) = (&name[first..], &before[first..]);
        let last = equal(rest.iter().rev().zip(rest_before.iter().rev()));
        put(&mut to, first as u64);
        put(&mut to, last as u64);
        put_bytes(&mut to, &rest[..rest.len() - last]);
        let dtype = Dtype::ALL.iter().position(|one| one == dtype).expect("all are listed");
        to.extend([dtype as u8, u8::from(*object)]);
        put_all(&mut to, shape);
        before = name;
    }
    to
}

/// How many pairs are of equal bytes, before the first that is not.
fn equal<'a>(pairs: impl Iterator<Item = (&'a u8, &'a u8)>) -> usize {
    pairs.take(SHARED_MAX).take_while(|(one, other)| one == other).count()
}

fn pack_chunks(tensors: &[TensorEntry]) -> Vec<u8> {
    let mut to = Vec::new();
    for TensorEntry { chunks, .. } in tensors {
        put(&mut to, chunks.len() as u64);
        for chunk in chunks {
            put(&mut to, chunk.file.into());
            put(&mut to, chunk.begin);
            let extent = chunk.extent();
            to.push(extent.is_some().into());
            if let Some((offsets, sizes)) = extent {
                put_all(&mut to, offsets);
                sizes.iter().for_each(|&number| put(&mut to, number));
            }
        }
    }
    to
}

fn put(to: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    put(to, bytes.len() as u64);
    to.extend_from_slice(bytes);
}

fn put_all(to: &mut Vec<u8>, numbers: &[u64]) {
    put(to, numbers.len() as u64);
    numbers.iter().for_each(|&number| put(to, number));
}

/// A receipt whose checksum matches, not read further than its tensors.
pub struct Packed<'a> {
    pub rank: u32,
    pub session: &'a str,
    pub write: &'a str,
    pub block_bytes: u64,
    pub apart: Vec<&'a str>,
    /// Names, dtypes and shapes, for [`tensors`].
    pub tensors: &'a [u8],
    chunks: Reader<'a>,
    files: Reader<'a>,
}

impl<'a> Packed<'a> {
    /// Checks what the bytes are, and that they are whole.
    ///
    /// # Errors
    /// What is wrong with them, as a sentence; so for all functions here.
    pub fn open(bytes: &'a [u8]) -> Read<Self> {
        let rest = bytes.strip_prefix(MAGIC).ok_or("they do not begin as one")?;
        let &version = rest.first().ok_or("it is cut")?;
        if version != VERSION {
            return Err(format!(
                "it has version {version}, and this library reads version {VERSION}: all ranks must use the same \
                 version of ringstow"
            ));
        }
        let (body, crc32) = bytes.split_last_chunk::<4>().ok_or("it is cut")?;
        if crc32fast::hash(body) != u32::from_le_bytes(*crc32) {
            return Err("its checksum does not match, so it is damaged".into());
        }
        let mut from = Reader(body.get(MAGIC.len() + 1..).ok_or("it is cut")?);
        let rank = from.small()?;
        let (session, write, block_bytes) = (from.text()?, from.text()?, from.number()?);
        let mut apart = Vec::new();
        for _ in 0..from.number()? {
            lists::push(&mut apart, from.text()?);
        }
        let (tensors, chunks) = (from.bytes()?, Reader(from.bytes()?));
        Ok(Self { rank, session, write, block_bytes, apart, tensors, chunks, files: from })
    }

    /// Appends its files to a list. Returns their number.
    pub fn read_files(&self, list: &mut Vec<FileEntry>) -> Read<u32> {
        let mut from = self.files;
        let count = from.small()?;
        for _ in 0..count {
            let (name, bytes) = (from.text()?.to_owned(), from.number()?);
            let words = from.number()?.checked_mul(4).ok_or("it is cut")?;
            let crc32 = from.take(words)?.as_chunks::<4>().0;
            let crc32 = crc32.iter().map(|word| u32::from_le_bytes(*word)).collect();
            let mut hashes = Vec::new();
            for _ in 0..from.number()? {
                let (begin, hash) = (from.number()?, from.take(size_of::<u128>() as u64)?);
                let hash = hash.try_into().map_err(|_| "it is cut")?;
                lists::push(&mut hashes, ChunkHash { begin, hash: u128::from_le_bytes(hash) });
            }
            lists::push(list, FileEntry { name, bytes, crc32, hashes });
        }
        from.end()?;
        Ok(count)
    }

    /// Gives each chunk of tensor after tensor to `take`, with the number of the tensor. There are `tensors` tensors.
    pub fn each_chunk(
        &self,
        tensors: usize,
        mut take: impl FnMut(usize, Chunk) -> Read<()>,
    ) -> Read<()> {
        let mut from = self.chunks;
        for tensor in 0..tensors {
            for _ in 0..from.number()? {
                take(tensor, from.chunk()?)?;
            }
        }
        from.end()
    }

    /// Everything.
    pub fn unpack(&self) -> Read<Receipt> {
        let (mut files, mut entries) = (Vec::new(), Vec::new());
        self.read_files(&mut files)?;
        tensors(self.tensors, |tensor| {
            lists::push(&mut entries, tensor.entry());
            Ok(())
        })?;
        self.each_chunk(entries.len(), |tensor, chunk| {
            entries[tensor].chunks.push(chunk);
            Ok(())
        })?;
        Ok(Receipt {
            rank: self.rank,
            session: self.session.into(),
            write: self.write.into(),
            block_bytes: self.block_bytes,
            files,
            tensors: entries,
            apart: self.apart.iter().map(|&part| part.into()).collect(),
        })
    }
}

/// A tensor, without its chunks.
pub struct Tensor<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: Shape,
    pub object: bool,
}

impl Tensor<'_> {
    /// Its entry, without chunks.
    pub fn entry(self) -> TensorEntry {
        let Self { name, dtype, shape, object } = self;
        TensorEntry { name: name.into(), dtype, shape, chunks: <_>::default(), object }
    }
}

/// Gives each of the tensors in a piece of a receipt to `take`.
pub fn tensors(bytes: &[u8], mut take: impl FnMut(Tensor<'_>) -> Read<()>) -> Read<()> {
    let (mut from, mut name) = (Reader(bytes), Vec::new());
    while !from.0.is_empty() {
        let (first, last) = (from.number()?, from.number()?);
        let (most, len) = (SHARED_MAX as u64, name.len() as u64);
        if first > most || last > most || first + last > len {
            return Err(format!("a name shares {first} and {last} bytes with one of {len}"));
        }
        name.splice(first as usize..(len - last) as usize, from.bytes()?.iter().copied());
        let text = std::str::from_utf8(&name).map_err(|_| "a name is no UTF-8")?;
        let &[dtype, object @ (0 | 1)] = from.take(2)? else { return Err("it is cut".into()) };
        let &dtype = Dtype::ALL.get(usize::from(dtype)).ok_or("a dtype is unknown")?;
        take(Tensor { name: text, dtype, shape: from.shape()?, object: object == 1 })?;
    }
    Ok(())
}

/// A number that is cut, or does not fit in 64 bits.
struct NoNumber;

impl From<NoNumber> for String {
    fn from(_: NoNumber) -> Self {
        "a number in it is cut or too large".into()
    }
}

/// Bytes that are still to be read.
#[derive(Clone, Copy)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    #[inline]
    fn number(&mut self) -> std::result::Result<u64, NoNumber> {
        match self.0.split_first() {
            Some((&byte @ 0..0x80, rest)) => {
                self.0 = rest;
                Ok(byte.into())
            }
            _ => self.long_number(),
        }
    }

    fn long_number(&mut self) -> std::result::Result<u64, NoNumber> {
        let mut number = 0;
        for (&byte, shift) in self.0.iter().zip((0..64).step_by(7)) {
            let bits = u64::from(byte & 0x7f);
            number |= bits << shift;
            if byte < 0x80 {
                self.0 = &self.0[shift / 7 + 1..];
                // The last byte has one bit of the 64.
                return if bits << shift >> shift == bits { Ok(number) } else { Err(NoNumber) };
            }
        }
        Err(NoNumber)
    }

    fn small(&mut self) -> Read<u32> {
        u32::try_from(self.number()?).map_err(|_| "a number does not fit in 32 bits".into())
    }

    fn take(&mut self, count: u64) -> Read<&'a [u8]> {
        let count = usize::try_from(count).map_err(|_| "it is cut")?;
        let (taken, rest) = self.0.split_at_checked(count).ok_or("it is cut")?;
        self.0 = rest;
        Ok(taken)
    }

    fn bytes(&mut self) -> Read<&'a [u8]> {
        let count = self.number()?;
        self.take(count)
    }

    fn text(&mut self) -> Read<&'a str> {
        std::str::from_utf8(self.bytes()?).map_err(|_| "a text is no UTF-8".into())
    }

    fn shape(&mut self) -> Read<Shape> {
        let dims = self.dims(1)?;
        Ok((0..dims).map(|_| self.number()).collect::<std::result::Result<_, _>>()?)
    }

    /// The number of dimensions of which `each` numbers follow. Each number takes a byte at least.
    fn dims(&mut self, each: usize) -> Read<usize> {
        let dims = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        match dims.checked_mul(each).is_some_and(|count| count <= self.0.len()) {
            true => Ok(dims),
            false => Err("it is cut".into()),
        }
    }

    fn chunk(&mut self) -> Read<Chunk> {
        let (file, begin) = (self.small()?, self.number()?);
        match self.number()? {
            0 => Ok(Chunk::whole(file, begin)),
            1 => {
                let dims = self.dims(2)?;
                Ok(Chunk::read((file, begin), dims, || self.number())?)
            }
            _ => Err("a chunk is of an unknown kind".into()),
        }
    }

    fn end(&self) -> Read<()> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(format!("{} bytes are left over", self.0.len())),
        }
    }
}
