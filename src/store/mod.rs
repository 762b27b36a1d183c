//! A checkpoint as a directory: how one comes to be, whole or not at all, and how it is found,
//! opened, read and checked.

mod catalog;
mod cleanup;
mod diff;
mod layout;
mod promote;
mod read;
mod write;

pub use catalog::found::{Found, Status};
pub use catalog::gone::has_gone;
#[cfg(feature = "cli")]
pub use catalog::in_flight::{InFlight, in_flight};
pub use catalog::join::{check_one_run, join};
pub(crate) use catalog::latest::why_lost;
pub use catalog::latest::{Wanted, latest, warn_if_lost};
pub use catalog::list::list;
pub use catalog::own_share::check_own_share;
pub use catalog::pins::{kept, pin, pinned, unpin};
#[cfg(feature = "cli")]
pub use catalog::runs::runs;
pub use catalog::steps::{Before, steps};
pub use cleanup::evict::{Evicted, Setting, check_covers, evict, is_everywhere};
pub use cleanup::going_back::Newer;
#[cfg(any(test, feature = "cli"))]
pub use cleanup::history::removals;
pub use cleanup::history::{add_to_history, was_removed};
pub use cleanup::keep::{Best, Direction};
pub use cleanup::look::Look;
pub use cleanup::prune::{Pruning, prune, prune_plan, prune_with};
pub use cleanup::remove::{Disposal, Removed, remove_checkpoint};
pub use cleanup::retain::{RetainOptions, Retained, retain, retain_plan, retain_seen};
pub use cleanup::slim::{Slimmed, older_steps, slim};
pub use diff::{DiffReport, ElementDiff, TensorChange, TensorDiff, ValueDiff, diff};
pub use layout::node::node_id;
pub use layout::recycled::{Recycled, recycled};
pub use layout::session_note::{give_up, given_up};
#[cfg(feature = "cli")]
pub use promote::Unfinished;
pub use promote::{
    Promotion, PromotionReport, check_apart, claim, claim_for, is_one_run, name_run, owner,
    promote, unfinished,
};
pub(crate) use read::again::{again, while_replaced};
pub use read::checkpoint::{Checkpoint, CheckpointKind, OpenOptions};
pub use read::copies::copies_of;
pub use read::foreign::{files_of_index, has_weights_by_torch, kind_and_weights, weights_in};
pub use read::info::{FileInfo, Info};
pub use read::kinds::{KINDS, TORCH_ENDINGS, deepspeed_directory, kind_of};
pub use read::load::{LoadOptions, OnCorrupt};
pub use read::loaded::{LoadPlace, Loaded, LoadedTensor, TensorView};
pub use read::mapped::MappedTensor;
pub use read::part::TensorPart;
pub use read::slices::Slice;
pub use read::source::ShardSource;
pub use read::verify::verify;
pub use write::export::export;
pub use write::model_session::{ModelLayout, ModelSession};
pub use write::model_share::write_model_share;
pub use write::node_session::{NodeSession, adopt};
pub use write::place::{check_own_name, check_run, follow};
pub use write::save::save;
pub use write::session::{Committed, Session, await_all_written};
pub use write::swept::{Left, Swept};
pub use write::write_rank::write_rank;
