//! The nodes of a checkpoint whose ranks share no directory: each has the manifest, and the files of its own ranks.

use super::Manifest;
use crate::format::lists::{Entry, LongDims};
use crate::format::names;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// A directory of checkpoints that some ranks share and the others do not see: on the disk of one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Identifies the directory: a text that no other has.
    pub id: String,
    /// The name of the host, for messages.
    pub host: String,
    /// The ranks that wrote there.
    pub ranks: Vec<u32>,
}

impl Entry for Node {
    fn count_dims(&self, _: &mut LongDims) -> Result<(), String> {
        Ok(())
    }
}

impl<T, S> Manifest<T, S> {
    /// Checks that each rank is on one node.
    pub(super) fn check_nodes(&self) -> Result<(), String> {
        let (mut ids, mut placed) = (HashSet::new(), HashSet::new());
        for node in &self.nodes {
            if !ids.insert(&node.id) {
                return Err(format!("two nodes have the id {:?}", node.id));
            }
            for &rank in &node.ranks {
                if rank >= self.world_size || !placed.insert(rank) {
                    return Err(format!(
                        "rank {rank} of {} is on two nodes, or is none",
                        self.world_size
                    ));
                }
            }
        }
        let is_placed =
            |name: &str| names::shard_rank(name).is_some_and(|rank| placed.contains(&rank));
        match self.files.iter().find(|file| !self.nodes.is_empty() && !is_placed(&file.name)) {
            Some(file) => Err(format!("{:?} is on none of its nodes", file.name)),
            None => Ok(()),
        }
    }

    /// The node whose ranks wrote a file; `None` if all ranks share one directory.
    pub fn node_of(&self, file: &str) -> Option<&Node> {
        let rank = names::shard_rank(file)?;
        self.nodes.iter().find(|node| node.ranks.contains(&rank))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{decode, sample};
    use super::*;

    #[test]
    fn nodes_round_trip_and_each_rank_is_on_one() {
        let node = |id: &str, ranks: &[u32]| Node {
            id: id.into(),
            host: "host".into(),
            ranks: ranks.into(),
        };
        let mut manifest = sample();
        manifest.world_size = 2;
        for (number, file) in manifest.files.iter_mut().enumerate() {
            file.name = names::shard(number as u32, 0, 3);
        }
        assert!(!String::from_utf8(manifest.encode().unwrap()).unwrap().contains("nodes"));
        manifest.nodes = vec![node("a", &[0]), node("b", &[1])];
        let read = decode(&manifest).unwrap();
        assert_eq!(read.nodes, manifest.nodes);
        assert_eq!(read.node_of("rank00001-0.g3.safetensors").unwrap().id, "b");
        for (nodes, why) in [
            (vec![node("a", &[0, 1]), node("b", &[1])], "rank 1 of 2"),
            (vec![node("a", &[0, 1, 2])], "rank 2 of 2"),
            (vec![node("a", &[0]), node("a", &[1])], "two nodes"),
            (vec![node("a", &[0])], "rank00001-0.g3.safetensors"),
        ] {
            manifest.nodes = nodes;
            let refused = decode(&manifest).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
