//! Which items of a save go into which file.

use crate::error::{Error, Result};
use crate::format::Item;
use crate::format::header::{Length, Reader};
use crate::format::lists::LongDims;
use crate::format::part::Part;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};

/// Bytes of a header beyond which a shard is full. Keeps the first read of a shard short.
pub const HEADER_BYTES_FULL: u64 = 50_000_000;

/// Bytes of the longest header that the safetensors library accepts
/// ([`MAX_HEADER_SIZE`](https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs)).
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// An item to be laid out.
#[derive(Debug, Clone, Copy)]
pub struct Member {
    /// Its index.
    pub item: usize,
    pub nbytes: u64,
    /// Number of earlier items of the same name. A file holds items of one layer only.
    pub layer: u32,
}

/// Checks the items, and keeps their order.
pub fn order(items: &[Item]) -> Result<Vec<Member>> {
    /// The first item of a name, and the number of items so far.
    struct Known {
        first: usize,
        count: u32,
    }
    let mut known: HashMap<&str, Known> = HashMap::with_capacity(items.len());
    let mut regions = HashSet::new();
    let mut order = Vec::with_capacity(items.len());
    let mut long = LongDims::default();
    for (index, item) in items.iter().enumerate() {
        item.check()?;
        count_dims(item, &mut long)?;
        let nbytes = item.info.nbytes()?;
        let of_name = known.entry(&item.info.name).or_insert(Known { first: index, count: 0 });
        if of_name.count > 0 {
            check_regions(&items[of_name.first], item)?;
        }
        // By hash, since comparing all pairs would take quadratic time. Empty regions, which uneven sharding
        // makes, may be at any offset.
        if item.region.is_some()
            && !item.info.shape.contains(&0)
            && !regions.insert((of_name.first, &item.region))
        {
            return Err(named_twice(item));
        }
        order.push(Member { item: index, nbytes, layer: of_name.count });
        of_name.count += 1;
    }
    Ok(order)
}

/// Counts the dimensions that an item has in the manifest.
fn count_dims(item: &Item, long: &mut LongDims) -> Result<()> {
    let lists = if item.region.is_some() { 3 } else { 1 }; // the tensor's shape, offsets, sizes
    (0..lists)
        .try_for_each(|_| long.add(item.info.shape.len()))
        .map_err(|why| Error::invalid(format!("{why}: no reader takes that")))
}

fn named_twice(item: &Item) -> Error {
    Error::invalid(format!("two tensors are named {:?}", item.info.name))
}

/// Checks that two items of one name are regions of one tensor.
fn check_regions(first: &Item, item: &Item) -> Result<()> {
    if first.region.is_none() || item.region.is_none() {
        return Err(named_twice(item));
    }
    let (name, shape) = (&item.info.name, item.tensor_shape());
    if (first.info.dtype, first.tensor_shape()) != (item.info.dtype, shape) {
        return Err(Error::invalid(format!(
            "tensor {name:?} is {} {:?} in one of its regions and {} {shape:?} in another",
            first.info.dtype,
            first.tensor_shape(),
            item.info.dtype
        )));
    }
    Ok(())
}

pub fn total(order: &[Member]) -> Result<u64> {
    order
        .iter()
        .try_fold(0u64, |sum, member| sum.checked_add(member.nbytes))
        .filter(|&sum| sum < 1 << 62)
        .ok_or_else(|| Error::invalid("the tensors add up to more than 2^62 bytes"))
}

/// Splits the items into groups that get files of their own: what goes with the same parts. Each keeps its order; what goes
/// with none comes first.
pub fn groups(order: Vec<Member>, items: &[Item], apart: &[Part]) -> Vec<Vec<Member>> {
    if apart.is_empty() || order.is_empty() {
        return vec![order];
    }
    let mut groups: BTreeMap<Vec<bool>, Vec<Member>> = BTreeMap::new();
    for member in order {
        let name = &items[member.item].info.name;
        let goes_with = apart.iter().map(|part| part.has(name)).collect();
        groups.entry(goes_with).or_default().push(member);
    }
    groups.into_values().collect()
}

/// Distributes the items over at most `lanes` lanes, none of them empty: the largest first, each to the lane with the
/// fewest bytes so far. Within a lane they keep their order.
///
/// The fullest lane then has at most its fair share and one more tensor.
pub fn deal(order: Vec<Member>, lanes: usize) -> Vec<Vec<Member>> {
    if lanes < 2 || order.len() < 2 {
        return vec![order];
    }
    let mut largest_first: Vec<usize> = (0..order.len()).collect();
    largest_first.sort_by_key(|&index| Reverse(order[index].nbytes));
    // By bytes, then by number: the first of equal lanes comes first.
    let mut least: BinaryHeap<Reverse<(u64, usize)>> =
        (0..lanes).map(|l| Reverse((0, l))).collect();
    let mut lane_of = vec![0; order.len()];
    // Empty tensors stay in the first lane: they need no file of their own.
    for index in largest_first.into_iter().filter(|&index| order[index].nbytes > 0) {
        let Reverse((bytes, lane)) = least.pop().expect("there is a lane");
        lane_of[index] = lane;
        least.push(Reverse((bytes + order[index].nbytes, lane)));
    }
    let mut dealt = vec![Vec::new(); lanes];
    order.into_iter().zip(lane_of).for_each(|(member, lane)| dealt[lane].push(member));
    dealt.retain(|members| !members.is_empty());
    dealt
}

/// Splits the items of a lane into shards, in order, by layer, by header size and by `shard_bytes`.
pub fn split(
    items: &[Item],
    order: &[Member],
    shard_bytes: u64,
    reader: Reader,
) -> Result<Vec<Vec<Member>>> {
    let empty = Length::empty(reader);
    let (mut shards, mut length): (Vec<Vec<Member>>, _) = (vec![Vec::new()], empty);
    for &member in order {
        let item = &items[member.item];
        let last = shards.last_mut().expect("there is always one");
        let longer = length.with(item, member.nbytes);
        let too_large = shard_bytes > 0 && longer.file_bytes_max() > shard_bytes;
        let other_layer = last.first().is_some_and(|first| first.layer != member.layer);
        let full = longer.bytes_max() > HEADER_BYTES_FULL;
        if !last.is_empty() && (full || too_large || other_layer) {
            shards.push(vec![member]);
            length = empty.with(item, member.nbytes);
        } else {
            last.push(member);
            length = longer;
        }
        if length.bytes_max() > HEADER_BYTES_MAX {
            return Err(too_long_a_name(item));
        }
    }
    Ok(shards)
}

/// The error for an item that is too long for a header by itself.
fn too_long_a_name(item: &Item) -> Error {
    let name = &item.info.name;
    let start: String = name.chars().take(40).collect();
    Error::invalid(format!(
        "the name of a tensor has {} bytes ({start:?}...): no reader of safetensors accepts a header of \
         more than {HEADER_BYTES_MAX}, which has the name twice; shorten it",
        name.len()
    ))
}
