//! A save by ranks on several nodes that share no directory. The first rank of each node holds a [`NodeSession`] in its
//! node's directory; the manifest, made by the first rank of all, is the same on all nodes and lists the files of all.
//!
//! Each node first writes the manifest under its uncommitted name. Once all have, each renames it. Once all have done that, each
//! removes the files of the checkpoint that was replaced. If a crash comes in between, the files of the other nodes have their
//! uncommitted names, and [`adopt`] finishes the commit there.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::receipt::Merged;
use crate::format::{FileEntry, Manifest, Node, names};
use crate::store::layout::node::{self, NodeId};
use crate::store::layout::stripes::Stripes;
use crate::store::write::rollback::Rollback;
use crate::store::write::session::Session;
use crate::store::write::transaction::Transaction;
use serde_json::value::RawValue;
use std::path::Path;

/// The part that the first rank of a node has in a save.
#[derive(Debug)]
pub struct NodeSession {
    session: Session,
    node: NodeId,
    prepared: Option<Box<Manifest>>,
}

impl NodeSession {
    /// Begins a save in this node's directory. `id` is the session's on all nodes.
    ///
    /// # Errors
    /// As for [`Session::begin`].
    pub fn begin(dir: &Path, world_size: u32, id: &str, config: &Config) -> Result<Self> {
        let node = node::node_id(&node::run_of(dir)?)?;
        let session = Session::begin_apart(dir, world_size, id, config)?;
        Ok(Self { session, node, prepared: None })
    }

    /// Sets what the manifest says of the save.
    ///
    /// # Errors
    /// As for [`Session::metrics`].
    pub fn describe(self, set: impl FnOnce(Session) -> Result<Session>) -> Result<Self> {
        Ok(Self { session: set(self.session)?, ..self })
    }

    /// The manifest of what all ranks wrote, in bytes. Takes files and tensors from `parts`.
    ///
    /// # Errors
    /// As for [`Session::commit`].
    pub fn manifest(
        &self,
        parts: &mut Merged,
        (state, names): (Box<RawValue>, &[String]),
        nodes: Vec<Node>,
    ) -> Result<Vec<u8>> {
        self.session.manifest(parts, (state, names), nodes)?.encode()
    }

    /// Makes sure that the files of this node's ranks are here, of which `parts` are, and writes the manifest under its
    /// uncommitted name.
    ///
    /// # Errors
    /// As for [`Session::commit`]. Then, and if this is dropped without [`NodeSession::keep`], what was written is removed.
    pub fn prepare(&mut self, parts: &Merged, manifest: Vec<u8>) -> Result<()> {
        let manifest = Manifest::decode(manifest, &self.session.path().join(names::MANIFEST))?;
        let node = manifest.nodes.iter().find(|node| node.id == self.node.id);
        let ranks: Vec<u32> = parts.writes.iter().map(|write| write.rank).collect();
        if node.is_none_or(|node| node.ranks != ranks) {
            return Err(Error::invalid(format!(
                "{} is of another node than {} says: was that removed, or copied to here, meanwhile?",
                self.session.path().display(),
                names::NODE
            )));
        }
        self.session.adopt_files(&parts.writes, &parts.files)?;
        self.session.transaction().prepare(&manifest, &parts.files)?;
        self.prepared = Some(Box::new(manifest));
        Ok(())
    }

    /// Keeps what was prepared, although this node does not commit: another one may.
    pub fn keep(&mut self) {
        self.session.transaction().keep();
    }

    /// Commits on this node. The files of the checkpoint that was replaced stay until [`NodeSession::end`].
    ///
    /// # Errors
    /// As for [`Session::commit`]. Then what was written stays: other nodes may have committed.
    ///
    /// # Panics
    /// If nothing was prepared.
    pub fn commit(&mut self) -> Result<()> {
        let manifest = self.prepared.as_ref().expect("a save is prepared before its commit");
        let transaction = self.session.transaction();
        transaction.keep();
        transaction.rename(manifest)
    }

    /// Clears up, once all nodes have committed.
    pub fn end(mut self) {
        if let Some(manifest) = &self.prepared {
            self.session.transaction().clear_replaced(&manifest.files);
            self.session.clear_marks();
        }
    }
}

/// Commits another node's checkpoint in this node's directory, whichever of its files are here, under whatever name. A
/// checkpoint that is there is replaced.
///
/// # Errors
/// [`Error::Format`] and [`Error::Corrupt`] for what is no manifest of several nodes; [`Error::Busy`]; [`Error::Io`].
pub fn adopt(dir: &Path, manifest: Vec<u8>) -> Result<()> {
    let manifest = Manifest::decode(manifest, &dir.join(names::MANIFEST))?;
    if manifest.nodes.is_empty() {
        return Err(Error::invalid(format!(
            "the checkpoint that is to be committed in {} is not of several nodes",
            dir.display()
        )));
    }
    let mut transaction =
        Transaction::begin_change(Rollback::begin(dir)?, Stripes::to_save(dir, &[])?)?;
    transaction.prepare(&manifest, &[] as &[FileEntry])?;
    transaction.conclude(&manifest).map(drop)
}
