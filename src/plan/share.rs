//! One rank's share of files that several ranks write at once.
//!
//! Another rank has created the files at their final length, padded, and writes their headers. A rank writes runs of
//! complete pages, and no other rank writes any of these pages: so no rank reads what another one writes.

use super::save::{Block, ItemRange, SavePlan, Shard};
use crate::error::{Error, Result};
use crate::format::header::Header;
use crate::limits::ALIGN;

/// Bytes of an item that go to a place in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the file.
    pub file: usize,
    /// Byte offset in the file.
    pub offset: u64,
    /// Index of the item.
    pub item: usize,
    /// Which of the item's bytes is the first.
    pub from: u64,
    /// Number of bytes, at least 1.
    pub bytes: u64,
    /// When the bytes are available: those of an earlier round are written first. Places that share a page have
    /// the same round.
    pub round: u32,
}

/// A file of which the rank writes some.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedFile {
    /// Its final name, for messages.
    pub name: String,
    /// Its final length.
    pub bytes: u64,
}

/// Plans the blocks that hold these places, which are sorted by file and offset, and nothing else.
///
/// # Errors
/// [`Error::Invalid`] if places overlap, or are not in their file, or do not fill the pages that they are in.
pub fn plan_share(files: &[SharedFile], places: &[Place], block_bytes: u64) -> Result<SavePlan> {
    let mut shards: Vec<Shard> = files.iter().map(shard).collect();
    let mut blocks: Vec<(u32, Block)> = Vec::new();
    for place in places {
        let shard = shards.get_mut(place.file).ok_or_else(|| wrong(place, "is in no file"))?;
        let end = place.offset.checked_add(place.bytes).filter(|&end| end <= shard.bytes);
        let end =
            end.filter(|_| place.bytes > 0).ok_or_else(|| wrong(place, "is not in its file"))?;
        if shard.items.last().is_some_and(|last| last.range.end > place.offset) {
            return Err(wrong(place, "overlaps the one before"));
        }
        shard.items.push(ItemRange {
            item: place.item,
            range: place.offset..end,
            from: place.from,
        });
        extend(&mut blocks, place, block_bytes)?;
    }
    for (_, block) in &blocks {
        let end = block.offset + block.len as u64;
        if !end.is_multiple_of(ALIGN as u64) && end != shards[block.shard].bytes {
            return Err(Error::invalid(format!("a share ends within a page, at byte {end}")));
        }
    }
    // A stable sort: those of one round stay in the order of their files.
    blocks.sort_by_key(|(round, _)| *round);
    let tensor_bytes = places.iter().map(|place| place.bytes).sum();
    let blocks = blocks.into_iter().map(|(_, block)| block).collect();
    Ok(SavePlan { is_share: true, ..SavePlan::of(blocks, shards, tensor_bytes) })
}

fn shard(file: &SharedFile) -> Shard {
    let (name, bytes) = (file.name.clone(), file.bytes);
    Shard { name, header: Header::none(), items: Vec::new(), bytes, lane: 0 }
}

/// Adds a place to the last block if it follows it and is of the same round, and to new blocks what that cannot take.
fn extend(blocks: &mut Vec<(u32, Block)>, place: &Place, block_bytes: u64) -> Result<()> {
    let (mut at, end) = (place.offset, place.offset + place.bytes);
    while at < end {
        let follows = |block: &Block| {
            (block.shard, block.offset + block.len as u64) == (place.file, at)
                && (block.len as u64) < block_bytes
        };
        let last =
            blocks.last_mut().filter(|(round, block)| *round == place.round && follows(block));
        let (_, block) = match last {
            Some(last) => last,
            None if at.is_multiple_of(ALIGN as u64) => {
                let block = Block { shard: place.file, offset: at, len: 0 };
                blocks.push((place.round, block));
                blocks.last_mut().expect("it was just pushed")
            }
            None => return Err(wrong(place, "begins within a page that it does not share")),
        };
        let taken = (end - at).min(block_bytes - block.len as u64);
        block.len += taken as usize;
        at += taken;
    }
    Ok(())
}

fn wrong(place: &Place, what: &str) -> Error {
    Error::invalid(format!("{place:?} {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::save::{Piece, PieceSource};

    const PAGE: u64 = ALIGN as u64;

    fn file(bytes: u64) -> SharedFile {
        SharedFile { name: "model.safetensors".into(), bytes }
    }

    fn place(offset: u64, bytes: u64, item: usize, from: u64, round: u32) -> Place {
        Place { file: 0, offset, item, from, bytes, round }
    }

    #[test]
    fn blocks_cover_the_places_and_nothing_else_by_rounds() {
        let places = [
            place(PAGE, 2 * PAGE - 10, 0, 5, 1),
            place(3 * PAGE - 10, 10, 1, 0, 1),
            place(8 * PAGE, PAGE, 0, 9000, 0),
            place(9 * PAGE, 100, 2, 0, 1),
        ];
        let plan = plan_share(&[file(9 * PAGE + 100)], &places, 4 * PAGE).unwrap();
        let blocks: Vec<(u64, u64)> =
            plan.blocks.iter().map(|block| (block.offset, block.len as u64)).collect();
        assert_eq!(blocks, [(8 * PAGE, PAGE), (PAGE, 2 * PAGE), (9 * PAGE, 100)]);
        let item = |item, range| Piece { from: PieceSource::Item(item), range };
        let end = 2 * ALIGN - 10;
        assert_eq!(plan.pieces(&plan.blocks[1]), [item(0, 5..end + 5), item(1, 0..10)]);
        assert_eq!(plan.pieces(&plan.blocks[0]), [item(0, 9000..9000 + ALIGN)]);
        assert!(plan.is_share);
    }

    #[test]
    fn a_long_place_takes_several_blocks() {
        let plan =
            plan_share(&[file(10 * PAGE)], &[place(0, 9 * PAGE, 0, 0, 0)], 4 * PAGE).unwrap();
        let lens: Vec<usize> = plan.blocks.iter().map(|block| block.len / ALIGN).collect();
        assert_eq!(lens, [4, 4, 1]);
    }

    #[test]
    fn places_that_would_touch_another_rank_s_page_are_refused() {
        for wrong in [
            vec![place(10, PAGE, 0, 0, 0)],
            vec![place(0, 100, 0, 0, 0)],
            vec![place(0, PAGE, 0, 0, 0), place(PAGE - 1, PAGE, 0, 0, 0)],
            vec![place(0, 10, 0, 0, 0), place(10, PAGE - 10, 0, 0, 1)],
            vec![place(9 * PAGE, 2 * PAGE, 0, 0, 0)],
            vec![place(0, 0, 0, 0, 0)],
            vec![Place { file: 1, ..place(0, PAGE, 0, 0, 0) }],
            vec![place(u64::MAX, PAGE, 0, 0, 0)],
        ] {
            assert!(plan_share(&[file(10 * PAGE)], &wrong, 4 * PAGE).is_err(), "{wrong:?}");
        }
    }
}
